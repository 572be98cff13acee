"""What a rank's stages really keep, tensor by tensor, while a ledger is open."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import keras
import tensorflow as tf

Bytes: TypeAlias = dict[int, int]  # by the address of a tensor's memory


class Ledger:
    """The most bytes that stages keep at once: `activations`, `gradients` and `versions`.

    Counted are real tensors, each piece of memory once: those that a stage keeps of a forward pass
    because its backward pass reads them, and of the input part of that for the weight part;
    gradients that wait for the update; and weights that a kept pass has read and that have changed
    since (`versions`). Weights that have not changed are no activations.

    Not counted: what an operation needs for the moment, messages on their way, and the lists of
    TensorFlow's loops, in which recurrent layers keep their steps. On a GPU addresses are not
    known, and weights that a kept pass has read count as activations.

    Args:
        steps: what the first so many keep is forgotten (not all micro-batches are under way yet);
            after as many again the ledger is closed and costs nothing. 0: closed from the start.
    """

    def __init__(self, steps: int = 0) -> None:
        self.open = steps > 0
        self.most = {"activations": 0, "gradients": 0, "versions": 0}
        self._steps, self._taken = steps, 0
        # By kind, then by stage and micro-batch; gradients have no micro-batch.
        self._held: dict[str, dict[tuple[int, int | None], Bytes]] = {
            kind: {} for kind in self.most
        }
        self._weights: dict[int, Bytes] = {}  # of each stage, as they are now

    def step(self) -> None:
        """A training step begins."""
        if self._taken == self._steps:
            self.most = dict.fromkeys(self.most, 0)
        self.open = self._taken < 2 * self._steps
        self._taken += 1

    def keep(
        self,
        stage: Hashable,
        number: int,
        tensors: Iterable[tf.Tensor],
        variables: Iterable[keras.Variable] = (),
    ) -> None:
        """A stage keeps these tensors of a micro-batch, weights among them, until `drop`."""
        if not self.open:
            return
        self._weights[id(stage)] = _bytes(variable.value.value() for variable in variables)
        kept = _bytes(tensors)
        read = {place: kept.pop(place) for place in self._weights[id(stage)] if place in kept}
        self._held["activations"][id(stage), number] = kept
        self._held["versions"][id(stage), number] = read
        self._count("activations")
        self._count("versions")

    def gather(self, stage: Hashable, gradients: Iterable[tf.Tensor]) -> None:
        """A stage has these gradients until its next ones."""
        if self.open:
            self._held["gradients"][id(stage), None] = _bytes(gradients)
            self._count("gradients")

    def drop(self, stage: Hashable, number: int) -> None:
        """A stage keeps nothing of a micro-batch any longer."""
        for kind in ("activations", "versions"):
            self._held[kind].pop((id(stage), number), None)

    def _count(self, kind: str) -> None:
        together: Bytes = {}
        for held in self._held[kind].values():
            together |= held
        for weights in self._weights.values():
            for place in weights:
                together.pop(place, None)
        self.most[kind] = max(self.most[kind], sum(together.values()))


def _is_memory(value: tf.Tensor) -> bool:
    """Whether it is a tensor with numbers in it; single ones do not count."""
    if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy"):
        return False
    return value.dtype not in (tf.resource, tf.variant, tf.string) and value.shape.rank > 0


def _bytes(tensors: Iterable[tf.Tensor]) -> Bytes:
    # Of `numpy` only the private form gives the tensor's own memory, not a copy of it.
    arrays = [tensor._numpy() for tensor in tensors if _is_memory(tensor)]
    return {array.ctypes.data: array.nbytes for array in arrays}
