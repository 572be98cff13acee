"""What of a batch goes through the stages at a time: rows of it, or time steps of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.schedules.pipeline.wavefront import stretches


class MicroBatches:
    """A batch cut into rows.

    Args:
        x, y, weight: of the batch; a weight may be None.
        count: of micro-batches, of equal size up to one row; some may be empty.
    """

    def __init__(self, x: Any, y: Any, weight: Any, count: int) -> None:
        self._x, self._y, self._weight = x, y, weight
        self._edges = cut(len(x), [1.0] * count)

    def rows(self, number: int) -> int:
        """Of a micro-batch."""
        return self._edges[number + 1] - self._edges[number]

    def share(self, number: int) -> float:
        """Of the batch, by which a micro-batch counts."""
        return self.rows(number) / len(self._x)

    def reaches(self, number: int, stage: int) -> bool:
        """Whether a micro-batch has something for a stage."""
        return self.rows(number) > 0

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """The first axes of what a stage takes of it."""
        return (self.rows(number),)

    def input(self, number: int) -> Any:
        """Of the first stage."""
        return self._part(self._x, number)

    def targets(self, number: int) -> tuple[Any, Any]:
        """Targets and sample weights, of the last stage."""
        return self._part(self._y, number), self._part(self._weight, number)

    def _part(self, value: Any, number: int) -> Any:
        return None if value is None else value[self._edges[number] : self._edges[number + 1]]


class Stretches(MicroBatches):
    """A batch of sequences cut into stretches of time steps, each with all rows.

    Args:
        x, y, weight: of the batch: inputs (rows, steps, …); weights (rows, steps) or (rows, 1), and
            (rows,) where the model answers once.
        count: of stretches, of equal length up to one step.
        opened: of the input of each stage, and of the output of the last one, whether it is a
            sequence. What is none passes with the last stretch alone.

    Raises:
        InvalidInput: fewer steps than stretches, not a target a step, weights of another shape.
    """

    def __init__(self, x: Any, y: Any, weight: Any, count: int, opened: Sequence[bool]) -> None:
        self._x, self._y, self._weight, self._opened = x, y, weight, opened
        self._edges = stretches(x.shape[1], count)
        self._steps, self._last = x.shape[1], count - 1
        if opened[-1] and (len(y.shape) < 2 or y.shape[1] != self._steps):
            raise InvalidInput(
                f"the model answers each of {self._steps} steps, but targets are of shape "
                f"{[None, *y.shape[1:]]}; give one a step, or let the last recurrent layer have "
                "return_sequences=False"
            )
        if opened[-1] and weight is not None and len(weight.shape) < 2:
            raise InvalidInput(
                "sample weights of shape [None] would count steps, not rows, where the model "
                "answers each step; give shape [None, 1], or a weight a step"
            )

    def rows(self, number: int) -> int:
        """All of the batch."""
        return len(self._x)

    def share(self, number: int) -> float:
        """Of the steps."""
        return self._length(number) / float(self._steps)

    def reaches(self, number: int, stage: int) -> bool:
        """Whether a stretch has something for a stage."""
        return len(self._x) > 0 and (self._opened[stage] or number == self._last)

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """Rows, and steps where the stage takes a sequence."""
        return (len(self._x), *([self._length(number)] if self._opened[stage] else []))

    def targets(self, number: int) -> tuple[Any, Any]:
        """Those of the steps, where the model answers each step."""
        y, weight = self._y, self._weight
        if self._opened[-1]:
            y = self._part(y, number)
            if weight is not None and weight.shape[1:2] == (self._steps,):
                weight = self._part(weight, number)
        return y, weight

    def _length(self, number: int) -> int:
        return self._edges[number + 1] - self._edges[number]

    def _part(self, value: Any, number: int) -> Any:
        return value[:, self._edges[number] : self._edges[number + 1]]
