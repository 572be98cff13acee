"""Faults that labkit injects into a training run: the kind of failure, the rank and the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from labkit.common.quantity_fields import PositiveSeconds
from labkit.common.validated import Checked

# The dict KINDS maps each kind of fault to its fields. For each field, KINDS contains the default
# value.
KINDS: dict[str, dict[str, Any]] = {
    "kill": {},
    "pause": {"seconds": 1.0},
    "slow": {"factor": 2.0, "steps": 1},
    "drop": {"message": 0},
    "corrupt": {"message": 0, "offset": None, "bit": None},
    "nan": {"layer": None, "offset": 0},
    "inf": {"layer": None, "offset": 0},
}


class Fault(Checked):
    """A fault that labkit injects into one rank at a given training step.

    Args:
        kind: With "kill", the process dies at the start of the step. With "pause", the process
            stops at the start of the step for `seconds`. With "slow", the computation takes
            `factor` times as long during `steps` training steps. With "drop", a message of the step
            is not sent. With "corrupt", one bit of a sent message flips. With "nan" and "inf", one
            element of the gradient becomes NaN or infinite.
        rank: The rank in which the fault occurs. On the virtual clock and in worker programs,
            `rank` is the worker's number.
        step: The number of the training step in which the fault occurs, counted from 0 across all
            epochs.
        seconds: Seconds for which a "pause" fault stops the process; default: 1.
        factor: The factor by which a "slow" fault multiplies compute times, at least 1; default: 2.
        steps: The number of training steps for which a "slow" fault lasts; default: 1.
        message: Index of the dropped or corrupted message in the affected step; default: 0. The
            index counts only the data messages that the rank sends.
        offset, bit: Index of the affected element, and index of the flipped bit in the element. By
            default, a "corrupt" fault flips a random bit of a random element.
        layer: The name of the layer whose gradient becomes NaN or infinite. By default, the fault
            affects the first gradient that the rank sends.
    """

    rank: int = Field(ge=0)
    step: int = Field(ge=0)
    kind: Literal["kill", "pause", "slow", "drop", "corrupt", "nan", "inf"] = Field(kw_only=False)
    seconds: PositiveSeconds | None = None
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    steps: int | None = Field(default=None, gt=0)
    message: int | None = Field(default=None, ge=0)
    offset: int | None = Field(default=None, ge=0)
    bit: int | None = Field(default=None, ge=0)
    layer: str | None = None

    told: ClassVar[tuple[str, ...]] = ("rank", "step", "kind")

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        options = KINDS[self.kind]
        fields = {n for n in type(self).model_fields if getattr(self, n) is not None}
        if wrong := sorted(fields - set(self.told) - set(options)):
            allowed = ", ".join(options) or "no options"
            raise ValueError(
                f"{wrong[0]}={getattr(self, wrong[0])!r} does not apply to kind={self.kind!r}, "
                f"which has {allowed}"
            )
        for name, default in options.items():
            if name not in fields:
                object.__setattr__(self, name, default)
        return self

    @model_serializer(mode="wrap")
    def _what_counts(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if value is not None}

    def hits(self, step: int) -> bool:
        """Return whether the fault is active in the training step with the given number."""
        return self.step <= step < self.step + (self.steps or 1)

    def flipped(self, data: np.ndarray, seed: int) -> np.ndarray:
        """Return a copy of a message's array in which one bit is flipped."""
        copy = data.copy()
        random = np.random.default_rng([seed, self.rank, self.step])
        element = int(random.integers(copy.size)) if self.offset is None else self.offset
        bits = 8 * copy.itemsize
        bit = int(random.integers(bits)) if self.bit is None else self.bit % bits
        place = element % copy.size * copy.itemsize + bit // 8
        copy.reshape(-1).view(np.uint8)[place] ^= np.uint8(1 << bit % 8)
        return copy

    def poisoned(self, gradient: np.ndarray) -> np.ndarray:
        """Return a copy of a gradient in which one element is NaN or infinite."""
        copy = gradient.copy()
        copy.reshape(-1)[(self.offset or 0) % copy.size] = (
            math.inf if self.kind == "inf" else math.nan
        )
        return copy

    def names(self, path: str) -> bool:
        """Return whether a variable belongs to the layer that the fault affects.

        Args:
            path: The path of the variable in the Keras model, such as "dense/kernel".
        """
        return self.layer is None or self.layer in (path, *path.split("/")[:-1])


def remaining_faults(faults: Sequence[Fault], ranks: Sequence[int]) -> list[Fault]:
    """Return the faults left after a restart: all except the first "kill" of each dead rank.

    Args:
        faults: The faults that were scheduled before the restart.
        ranks: The numbers of the ranks that died.
    """
    kills = sorted((f for f in faults if f.kind == "kill"), key=lambda f: f.step)
    happened = [next((f for f in kills if f.rank == rank), None) for rank in ranks]
    return [fault for fault in faults if fault not in happened]
