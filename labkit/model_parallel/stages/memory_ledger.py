"""Measurement of the memory that a rank's pipeline stages use, tensor by tensor."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import keras
import tensorflow as tf

Bytes: TypeAlias = dict[int, int]  # bytes by a tensor's memory address


class MemoryLedger:
    """The maximum bytes of `activations`, `gradients` and `versions` that stages store at a time.

    The ledger counts the bytes of real tensors; tensors that share a memory block are counted once.
    "activations" are the tensors that a stage saves between a forward pass and its backward pass,
    or between the two parts of the backward pass. "gradients" are weight gradients that are stored
    until the update. "versions" are old weights that a pending backward pass still needs, although
    the variables have changed since its forward pass. Current weights do not count as activations,
    even if a backward pass reads them.

    The ledger omits messages and the temporary memory of operations. The ledger also omits the
    tensor lists of TensorFlow loops, in which recurrent layers store their time steps. On a GPU,
    memory addresses are unknown, so weights that a backward pass reads count as activations.

    Args:
        steps: Number of warm-up training steps, whose values are discarded because the pipeline is
            not yet full. After the warm-up, the ledger measures the same number of training steps,
            and then records nothing. With `steps=0`, the ledger never records anything.
    """

    def __init__(self, steps: int = 0) -> None:
        self.open = steps > 0
        self.most = {"activations": 0, "gradients": 0, "versions": 0}
        self._steps, self._step = steps, 0
        # The keys are the kind of memory, then (stage, micro-batch); the micro-batch is None for
        # gradients.
        self._stored: dict[str, dict[tuple[int, int | None], Bytes]] = {
            kind: {} for kind in self.most
        }
        self._weights: dict[int, Bytes] = {}  # by stage: bytes of the current weights

    def step(self) -> None:
        """Count the start of a training step; the ledger measures only in some training steps."""
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
        """Record the tensors, including weights, that a stage stores for a micro-batch."""
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
        """Record the gradients that a stage stores; they replace the stage's previous gradients."""
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
    """Return whether a value is a numeric tensor, not a scalar, with memory of its own."""
    if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy"):
        return False
    return value.dtype not in (tf.resource, tf.variant, tf.string) and value.shape.rank > 0


def _bytes(tensors: Iterable[tf.Tensor]) -> Bytes:
    # Only the private method `_numpy()` returns the tensor's memory without a copy; `numpy()`
    # copies it.
    arrays = [tensor._numpy() for tensor in tensors if _is_memory(tensor)]
    return {array.ctypes.data: array.nbytes for array in arrays}
