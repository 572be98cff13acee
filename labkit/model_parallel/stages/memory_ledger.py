"""A ledger that measures the memory of a rank's stages, tensor by tensor, while it is open."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import keras
import tensorflow as tf

Bytes: TypeAlias = dict[int, int]  # bytes by a tensor's memory address


class MemoryLedger:
    """The maximum bytes of `activations`, `gradients` and `versions` that stages store at once.

    The ledger counts real tensors; each memory block counts once. "activations" are the tensors
    that a stage saves between a forward pass and its backward pass, or between the two parts of a
    backward pass. "gradients" are weight gradients that wait for the update.
    "versions" are weights that a saved pass has read and that have changed since then. Unchanged
    weights do not count as activations.

    The ledger does not count temporary memory of operations, messages, or the tensor lists of
    TensorFlow loops, in which recurrent layers store their steps. On a GPU addresses are unknown,
    so weights that a saved pass has read count as activations.

    Args:
        steps: Number of warm-up steps, whose values are discarded because not all micro-batches are
            in flight. After the same number of further steps, the ledger closes and costs no more
            time. 0: the ledger is closed from the start.
    """

    def __init__(self, steps: int = 0) -> None:
        self.open = steps > 0
        self.most = {"activations": 0, "gradients": 0, "versions": 0}
        self._steps, self._step = steps, 0
        # Keys are the kind, then (stage, micro-batch); for gradients, the micro-batch is None.
        self._stored: dict[str, dict[tuple[int, int | None], Bytes]] = {
            kind: {} for kind in self.most
        }
        self._weights: dict[int, Bytes] = {}  # current weights of each stage

    def step(self) -> None:
        """Start a training step."""
        if self._step == self._steps:
            self.most = dict.fromkeys(self.most, 0)
        self.open = self._step < 2 * self._steps
        self._step += 1

    def keep(
        self,
        stage: Hashable,
        number: int,
        tensors: Iterable[tf.Tensor],
        variables: Iterable[keras.Variable] = (),
    ) -> None:
        """Record that a stage stores these tensors of a micro-batch, weights included."""
        if not self.open:
            return
        self._weights[id(stage)] = _bytes(variable.value.value() for variable in variables)
        stored = _bytes(tensors)
        read = {place: stored.pop(place) for place in self._weights[id(stage)] if place in stored}
        self._stored["activations"][id(stage), number] = stored
        self._stored["versions"][id(stage), number] = read
        self._count("activations")
        self._count("versions")

    def gather(self, stage: Hashable, gradients: Iterable[tf.Tensor]) -> None:
        """Record the gradients of a stage; they replace its previous gradients."""
        if self.open:
            self._stored["gradients"][id(stage), None] = _bytes(gradients)
            self._count("gradients")

    def drop(self, stage: Hashable, number: int) -> None:
        """Record that a stage has freed its tensors of a micro-batch."""
        for kind in ("activations", "versions"):
            self._stored[kind].pop((id(stage), number), None)

    def _count(self, kind: str) -> None:
        union: Bytes = {}
        for tensors in self._stored[kind].values():
            union |= tensors
        for weights in self._weights.values():
            for place in weights:
                union.pop(place, None)
        self.most[kind] = max(self.most[kind], sum(union.values()))


def _is_memory(value: tf.Tensor) -> bool:
    """Whether the value is a tensor with its own numeric memory; scalars do not count."""
    if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy"):
        return False
    return value.dtype not in (tf.resource, tf.variant, tf.string) and value.shape.rank > 0


def _bytes(tensors: Iterable[tf.Tensor]) -> Bytes:
    # Only the private method returns the tensor's own memory; `numpy()` returns a copy.
    arrays = [tensor._numpy() for tensor in tensors if _is_memory(tensor)]
    return {array.ctypes.data: array.nbytes for array in arrays}
