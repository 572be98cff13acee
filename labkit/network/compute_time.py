"""How long a worker computes, by a law."""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from labkit.common.quantity_fields import Seconds
from labkit.common.validated import Checked
from labkit.network.random_streams import drawn


class ComputeTime(Checked):
    r"""What a worker's gradient takes on the virtual clock, s; each worker and step has its own.

    Numbers depend on the seed, the worker and the step alone: another strategy, or another worker
    that is slower, changes none of them.

    Args:
        seconds: the mean; None: measured, once, by the process that plays all workers, while it
            does nothing else.
        law: "constant"; "exponential"; "lognormal", \(e^{\sigma z - \sigma^2 / 2}\) of the mean.
        spread: σ of the lognormal law.
        values: taken one after the other and again from the first, in place of a law; or one such
            list a worker.
        update: what a server's update takes, s; None: measured, where seconds are, else 0.
    """

    seconds: Seconds | None = Field(default=None, kw_only=False)
    law: Literal["constant", "exponential", "lognormal"] = "constant"
    spread: Annotated[float, Field(ge=0, le=5)] = 0.5
    values: tuple[Seconds, ...] | tuple[tuple[Seconds, ...], ...] | None = None
    update: Seconds | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> ComputeTime:
        if self.values is not None and (self.seconds is not None or not self.values):
            raise ValueError("give seconds and a law, or values, at least one")
        return self

    @classmethod
    def parse(cls, value: Any) -> Any:
        """A number, or a text such as "5ms", is a constant; a list are values; a mapping fields."""
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return cls(seconds=value)
        if isinstance(value, list | tuple):
            return cls(values=value)
        return cls(**value) if isinstance(value, dict) else value

    @property
    def mean(self) -> float | None:
        """Seconds on average; None: as measured."""
        return self.seconds if self.values is None else float(np.mean(self.values))

    @property
    def even(self) -> bool:
        """Whether each step takes as long as the others."""
        narrow = self.law == "constant" or (self.law == "lognormal" and not self.spread)
        return self.values is None and narrow

    def of(self, worker: int, step: int, seed: int, measured: float) -> float:
        """What this step takes a worker; `measured` stands for seconds that were not given."""
        if self.values is not None:
            own = self.values[worker % len(self.values)] if _nested(self.values) else self.values
            return float(own[step % len(own)])  # type: ignore[index,arg-type]
        number = 0.5 if self.even else drawn(seed, 1, worker, step)
        return self.quantile(number, measured)

    def quantile(self, number: float, measured: float) -> float:
        """Seconds below which the law is with a probability in [0, 1): a number draws by it."""
        mean = measured if self.seconds is None else self.seconds
        if self.law == "constant":
            return mean
        if self.law == "exponential":
            return float(-mean * np.log1p(-number))
        z = NormalDist().inv_cdf(min(max(number, 1e-12), 1 - 1e-12))
        return float(mean * np.exp(self.spread * z - self.spread**2 / 2))


def _nested(values: tuple[Any, ...]) -> bool:
    return isinstance(values[0], tuple)
