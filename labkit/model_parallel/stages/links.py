"""What passes between stages on different ranks: outputs forth, gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator


class Links:
    """Messages between the stages of one replica; stage s is on rank s mod ranks.

    Args:
        communicator: the ranks of the replica, in the order of the stages.
        inputs: of every stage, the tensor that comes in: its shape without rows, and its dtype.
        outputs: of every stage, likewise.
    """

    def __init__(
        self, communicator: Communicator, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        self.communicator, self._inputs, self._outputs = communicator, inputs, outputs

    def send(self, value: Any, stage: int, peer: int) -> list[Any]:
        """Begin to send a stage's tensor to a peer; what `Communicator.finish` takes."""
        data = np.ascontiguousarray(value)
        return self.communicator.post(data, peer % self.communicator.size, _tag(stage, peer))

    def receive(self, stage: int, peer: int, *size: int) -> Any:
        """The tensor that a peer has sent to a stage; its first axes: rows, or rows and steps."""
        spec = self._outputs[stage] if peer > stage else self._inputs[stage]
        data = np.empty((*size, *spec.shape[len(size) :]), tf.as_dtype(spec.dtype).as_numpy_dtype)
        self.communicator.recv(data, peer % self.communicator.size, _tag(peer, stage))
        return tf.constant(data)


def _tag(source: int, destination: int) -> int:
    """Of each pair of stages its own: between two ranks there may be several."""
    return 2 * source + (destination > source)
