"""A fault that is planted in a training: what goes wrong, on which rank, in which step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from labkit.common.quantity_fields import PositiveSeconds
from labkit.common.validated import Checked

# What may be said of each kind, and what it is where that is not said.
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
    """One fault, in one step of one rank.

    Args:
        kind: "kill": it is gone when the step begins; "pause": it stands still then for
            `seconds`; "slow": it computes `factor` times as long for so many `steps`; "drop": a
            message of the step is never sent; "corrupt": one bit of what it sends in the step is
            flipped; "nan" and "inf": an element of its gradient becomes so.
        rank: whose; on the virtual clock, and of programs, the worker.
        step: counted from 0 through all epochs.
        seconds, factor, steps: see above.
        message: of those with values that it sends in the step, the number of the one meant.
        offset, bit: the element that is hit, and its bit; default: drawn from the seed.
        layer: whose gradient is hit, by its name; default: that which travels first.
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
        taken = KINDS[self.kind]
        given = {n for n in type(self).model_fields if getattr(self, n) is not None}
        if wrong := sorted(given - set(self.told) - set(taken)):
            allowed = ", ".join(taken) or "nothing else"
            raise ValueError(
                f"{wrong[0]}={getattr(self, wrong[0])!r} says nothing of kind={self.kind!r}, "
                f"which takes {allowed}"
            )
        for name, default in taken.items():
            if name not in given:
                object.__setattr__(self, name, default)
        return self

    @model_serializer(mode="wrap")
    def _what_counts(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if value is not None}

    def hits(self, step: int) -> bool:
        """Whether it goes on in a step."""
        return self.step <= step < self.step + (self.steps or 1)

    def flipped(self, data: np.ndarray, seed: int) -> np.ndarray:
        """A copy of an array, in which one bit is another."""
        found = data.copy()
        draw = np.random.default_rng([seed, self.rank, self.step])
        element = int(draw.integers(found.size)) if self.offset is None else self.offset
        bits = 8 * found.itemsize
        bit = int(draw.integers(bits)) if self.bit is None else self.bit % bits
        place = element % found.size * found.itemsize + bit // 8
        found.reshape(-1).view(np.uint8)[place] ^= np.uint8(1 << bit % 8)
        return found

    def poisoned(self, gradient: np.ndarray) -> np.ndarray:
        """A copy of a gradient, with an element that is no number, or infinite."""
        found = gradient.copy()
        found.reshape(-1)[(self.offset or 0) % found.size] = (
            math.inf if self.kind == "inf" else math.nan
        )
        return found

    def names(self, path: str) -> bool:
        """Whether a variable is of the layer that is meant."""
        return self.layer is None or self.layer in (path, *path.split("/")[:-1])


def left(faults: Sequence[Fault], ranks: Sequence[int]) -> list[Fault]:
    """Those that are still to come: all but the first kill that was planted for each rank."""
    kills = sorted((f for f in faults if f.kind == "kill"), key=lambda f: f.step)
    happened = [next((f for f in kills if f.rank == rank), None) for rank in ranks]
    return [fault for fault in faults if fault not in happened]
