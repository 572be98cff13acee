"""The compute time of a worker's steps: constant, random, or recorded."""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from labkit.common.quantity_fields import Seconds
from labkit.common.validated import Checked

_MOST = 2**64 - 1


def uniform(seed: int, *keys: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return random numbers in [0, 1) that depend only on the seed and the keys.

    Source: the generator splitmix64, Steele et al. 2014.
    """
    state = np.array([seed % 2**64], np.uint64)
    for key in keys:
        state = state + np.uint64(0x9E3779B97F4A7C15) + np.asarray(key).astype(np.uint64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def uniform_scalar(seed: int, *keys: int) -> float:
    """Return the same number as `uniform` for scalar keys, but a few times faster."""
    state = seed & _MOST
    for key in keys:
        state = (state + 0x9E3779B97F4A7C15 + (key & _MOST)) & _MOST
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MOST
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MOST
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


class ComputeTime(Checked):
    r"""On the virtual clock, the seconds that each worker needs to compute a step's gradient.

    A random compute time depends only on the seed, the worker and the step. Neither the strategy
    nor the speed of other workers changes a worker's random compute times.

    Args:
        seconds: Mean seconds per training step. If `seconds` is None (default), the simulating
            process measures the time once. During the measurement of the compute time, no other
            work runs.
        distribution: "constant" (default), "exponential", or "lognormal". A lognormal time is the
            mean times \(e^{\sigma z - \sigma^2 / 2}\). The number \(z\) is a random standard normal
            number.
        sigma: Parameter σ of the lognormal distribution; default: 0.5.
        trace: Seconds of successive training steps, repeated cyclically, which replace `seconds`
            and `distribution`. A trace may also be a sequence of sequences, one for each worker.
        update: Seconds that a parameter server needs for one update. If both `update` and `seconds`
            are None, labkit measures the time of an update. If only `update` is None, an update
            takes 0 s.
    """

    seconds: Seconds | None = Field(default=None, kw_only=False)
    distribution: Literal["constant", "exponential", "lognormal"] = "constant"
    sigma: Annotated[float, Field(ge=0, le=5)] = 0.5
    trace: tuple[Seconds, ...] | tuple[tuple[Seconds, ...], ...] | None = None
    update: Seconds | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> ComputeTime:
        if self.trace is not None and (self.seconds is not None or not self.trace):
            raise ValueError(
                "give either `seconds` and a `distribution`, or a `trace` of one or more times"
            )
        return self

    @classmethod
    def parse(cls, value: Any) -> Any:
        """Convert a number, text, sequence or mapping to a `ComputeTime`; keep any other value.

        Args:
            value: A number or a text such as "5ms" means a constant time. A sequence means a trace,
                and a mapping contains the fields.
        """
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return cls(seconds=value)
        if isinstance(value, list | tuple):
            return cls(trace=value)
        return cls(**value) if isinstance(value, dict) else value

    @property
    def mean(self) -> float | None:
        """The mean seconds per training step; None if labkit must measure the time."""
        return self.seconds if self.trace is None else float(np.mean(self.trace))

    @property
    def even(self) -> bool:
        """Whether all training steps of all workers have the same compute time."""
        constant = self.distribution == "constant" or (
            self.distribution == "lognormal" and not self.sigma
        )
        return self.trace is None and constant

    def of(self, worker: int, step: int, seed: int, measured: float) -> float:
        """Return the compute time, in seconds, of a worker's training step.

        Args:
            worker: The number of the worker.
            step: The number of the step.
            seed: The seed of the random compute times.
            measured: Measured mean seconds per step, used if `seconds` is None.
        """
        if self.trace is not None:
            trace = self.trace[worker % len(self.trace)] if _nested(self.trace) else self.trace
            return float(trace[step % len(trace)])  # type: ignore[index,arg-type]
        number = 0.5 if self.even else uniform_scalar(seed, 1, worker, step)
        return self.quantile(number, measured)

    def quantile(self, number: float, measured: float) -> float:
        """Return a quantile of the compute time, in s; a random `number` gives a random time.

        Args:
            number: The probability of the quantile, a number in [0, 1).
            measured: Measured mean seconds per step, used if `seconds` is None.
        """
        mean = measured if self.seconds is None else self.seconds
        if self.distribution == "constant":
            return mean
        if self.distribution == "exponential":
            return float(-mean * np.log1p(-number))
        z = NormalDist().inv_cdf(min(max(number, 1e-12), 1 - 1e-12))
        return float(mean * np.exp(self.sigma * z - self.sigma**2 / 2))


def _nested(values: tuple[Any, ...]) -> bool:
    return isinstance(values[0], tuple)
