"""What passes between stages on different ranks: outputs forth, gradients back, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator

if TYPE_CHECKING:
    from mpi4py import MPI

Posted: TypeAlias = "list[MPI.Request]"  # what `Communicator.finish` takes


class Links:
    """Messages between the stages of one replica; stage s is on rank s mod ranks.

    Args:
        communicator: the ranks of the replica, in the order of the stages.
        inputs: of every stage, the tensor that comes in: its shape without rows, and its dtype.
        outputs: of every stage, likewise.
    """

    def __init__(
        self,
        communicator: Communicator,
        inputs: Sequence[keras.KerasTensor],
        outputs: Sequence[keras.KerasTensor],
    ) -> None:
        self.communicator, self._inputs, self._outputs = communicator, inputs, outputs

    def send(self, value: tf.Tensor, stage: int, peer: int) -> Posted:
        """Begin to send a stage's tensor to a peer."""
        # Posted, not sent: the receiver may be busy with other rows of the schedule for long.
        data = np.ascontiguousarray(value)
        return self.communicator.post(data, peer % self.communicator.size, _tag(stage, peer))

    def receive(self, stage: int, peer: int, *size: int) -> tf.Tensor:
        """The tensor that a peer has sent to a stage; its first axes: rows, or rows and steps."""
        spec = self._outputs[stage] if peer > stage else self._inputs[stage]
        data = np.empty((*size, *spec.shape[len(size) :]), tf.as_dtype(spec.dtype).as_numpy_dtype)
        self.communicator.recv(data, peer % self.communicator.size, _tag(peer, stage))
        return tf.constant(data)


def _tag(source: int, destination: int) -> int:
    """Of each pair of stages its own: between two ranks there may be several."""
    return 2 * source + (destination > source)


class OwnLosses:
    """Adds up what the layers of all stages have added in a step: regularizers and the like.

    Where any stage has such losses it takes a sum over the ranks a step, outside of the traffic:
    those of a lane meet once a step. Where none has, nothing but one question after the first step.

    Args:
        communicator: the ranks of all stages.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._there = False  # on this rank
        self._anywhere: bool | None = None  # not known yet
        self._sum = 0.0

    def take(self, own: tf.Tensor | None, weight: float = 1.0) -> None:
        """What the layers of a stage have added in a forward pass; None: they never do."""
        if own is not None:
            self._there = True
            self._sum += float(own) * weight

    def added_to(self, loss: float | None) -> float | None:
        """The loss with those of all layers, where there is one (collective)."""
        # Asked after the first forward pass, not before: layers add losses when they are called.
        if self._anywhere is None:
            everyone = self._communicator.allgather(self._there, "whether layers have losses")
            self._anywhere = any(everyone)
        if not self._anywhere:
            return loss
        total, self._sum = self._communicator.total(self._sum, "the losses of layers"), 0.0
        return None if loss is None else loss + total
