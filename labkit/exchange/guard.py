"""Gradients that are not finite: found on their rank, before they meet those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypedDict

import numpy as np

from labkit.common.errors import LabkitError

Policy: TypeAlias = Literal["stop", "skip", "clip"]


class BadNumbers(LabkitError):
    """A gradient or a loss is infinite or not a number."""


class Bad(TypedDict):
    """What was found: elements of a gradient, or (layer "") the loss."""

    step: int
    rank: int
    layer: str
    elements: int


class Guard:
    """Looks at each gradient of this rank, one pass over it, and does what the policy says.

    "stop" raises, on this rank, and so ends all; "skip" says so, and nobody takes the step; "clip"
    puts 0 in the place of what is not finite.

    Args:
        policy: see above.
        rank: this one's.
        loss: of the step under way, as far as it is known.

    Attributes:
        step: that which is under way.
        found: what was bad so far.
    """

    def __init__(self, policy: Policy, rank: int, loss: Callable[[], float] = lambda: 0.0) -> None:
        self.policy, self.rank, self.loss = policy, rank, loss
        self.step = 0
        self.found: list[Bad] = []

    def look(
        self,
        paths: Sequence[str],
        arrays: Sequence[np.ndarray],
        rank: int | None = None,
        loss: float | None = None,
    ) -> tuple[list[np.ndarray], bool]:
        """Gradients of variables as they may go on, and whether the step is to be skipped.

        Args:
            paths: of the variables, in the order in which backpropagation reaches them.
            arrays: of each.
            rank: whose they are, where not this one's.
            loss: theirs, where it is not that of the step under way.

        Raises:
            BadNumbers: under "stop".
        """
        found, skips = list(arrays), False
        for number, (path, array) in enumerate(zip(paths, arrays, strict=True)):
            if is_finite(array):
                continue
            good = np.isfinite(array)
            bad = int(good.size - np.count_nonzero(good))
            self.note(layer_of(path), bad, rank, path, loss)
            if self.policy == "clip":
                found[number] = np.where(good, array, array.dtype.type(0))
            skips = skips or self.policy == "skip"
        return found, skips

    def note(
        self,
        layer: str,
        elements: int,
        rank: int | None = None,
        path: str = "",
        loss: float | None = None,
    ) -> None:
        """Write down what is bad. Raises: BadNumbers, under "stop"."""
        whose = self.rank if rank is None else rank
        self.found.append(Bad(step=self.step, rank=whose, layer=layer, elements=elements))
        if self.policy != "stop":
            return
        what = f"the loss of rank {whose} is not finite"
        if layer:
            what = f"the gradient of layer {layer!r} on rank {whose} is not finite ({path})"
            if not np.isfinite(self.loss() if loss is None else loss):
                what += ", nor is the loss"
        raise BadNumbers(
            f"step {self.step}: {what}; lower the learning rate, clip gradients (clipnorm), or go "
            "on without such steps: bad_numbers='skip'"
        )


def is_finite(array: np.ndarray) -> bool:
    """Whether all elements are; one pass over them, where their squares have a sum."""
    flat = array.reshape(-1)
    return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())


def layer_of(path: str) -> str:
    """The name of the layer that a variable belongs to, by its path."""
    above = path.split("/")[:-1]
    return above[-1] if above else path
