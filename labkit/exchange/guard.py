"""Detection of non-finite gradients on each rank, before the exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypedDict

import numpy as np

from labkit.common.errors import LabkitError

Policy: TypeAlias = Literal["stop", "skip", "clip"]


class BadNumbers(LabkitError):
    """A gradient or a loss is infinite or not a number (NaN)."""


class BadValues(TypedDict):
    """A record of non-finite values in one gradient or loss.

    Attributes:
        step: The number of the training step.
        rank: The rank whose gradient or loss has these values.
        layer: The layer of the gradient; "" if the values are in the loss.
        elements: The number of non-finite elements.
    """

    step: int
    rank: int
    layer: str
    elements: int


class Guard:
    """A check of this rank's gradients for non-finite values, which reads each gradient once.

    With the policy "stop", the guard raises an error on this rank, which ends the training of all
    ranks. With the policy "skip", all ranks skip the training step. With the policy "clip", the
    guard replaces non-finite values by 0.

    Args:
        policy: The reaction to non-finite values: "stop", "skip" or "clip".
        rank: The number of this rank.
        loss: A function that returns the loss of the current step, or 0 if the loss is not known
            yet.

    Attributes:
        step: The number of the current training step.
        records: The records of all non-finite values that this guard has found.
    """

    def __init__(self, policy: Policy, rank: int, loss: Callable[[], float] = lambda: 0.0) -> None:
        self.policy, self.rank, self.loss = policy, rank, loss
        self.step = 0
        self.records: list[BadValues] = []

    def check_gradients(
        self,
        paths: Sequence[str],
        arrays: Sequence[np.ndarray],
        rank: int | None = None,
        loss: float | None = None,
    ) -> tuple[list[np.ndarray], bool]:
        """Check gradients; return them, and whether to skip the training step.

        Args:
            paths: Paths of the variables, in the order of backpropagation.
            arrays: The gradient of each variable.
            rank: The rank that computed the gradients; default: this rank.
            loss: The loss for which these gradients were computed; default: the loss of the current
                step.

        Raises:
            BadNumbers: A gradient is not finite, and the policy is "stop".
        """
        results, skips = list(arrays), False
        for number, (path, array) in enumerate(zip(paths, arrays, strict=True)):
            if is_finite(array):
                continue
            good = np.isfinite(array)
            bad = int(good.size - np.count_nonzero(good))
            self.record(layer_of(path), bad, rank, path, loss)
            if self.policy == "clip":
                results[number] = np.where(good, array, array.dtype.type(0))
            skips = skips or self.policy == "skip"
        return results, skips

    def record(
        self,
        layer: str,
        elements: int,
        rank: int | None = None,
        path: str = "",
        loss: float | None = None,
    ) -> None:
        """Record non-finite values of a gradient or of the loss; the policy "stop" raises an error.

        Args:
            layer: The layer of the gradient; "" if the values are in the loss.
            elements: The number of non-finite elements.
            rank: The rank whose gradient or loss has these values; default: this rank.
            path: The path of the gradient's variable, for the error message.
            loss: The value of the loss, for the error message; default: the loss of the current
                step.

        Raises:
            BadNumbers: The policy is "stop".
        """
        source = self.rank if rank is None else rank
        self.records.append(BadValues(step=self.step, rank=source, layer=layer, elements=elements))
        if self.policy != "stop":
            return
        what = f"the loss on rank {source} is not finite"
        if layer:
            what = f"the gradient of layer {layer!r} on rank {source} is not finite ({path})"
            if not np.isfinite(self.loss() if loss is None else loss):
                what += ", and the loss is not finite, either"
        raise BadNumbers(
            f"step {self.step}: {what}; lower the learning rate, clip gradients (clipnorm), or "
            "skip steps with non-finite values: on_nonfinite='skip'"
        )


def is_finite(array: np.ndarray) -> bool:
    """Return whether all elements are finite; one pass is enough if squares do not overflow."""
    flat = array.reshape(-1)
    return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())


def layer_of(path: str) -> str:
    """Return the name of the layer that contains a variable, from the variable's path."""
    parents = path.split("/")[:-1]
    return parents[-1] if parents else path
