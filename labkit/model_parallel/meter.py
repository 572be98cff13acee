"""Messages between the ranks that share a layer, as TensorFlow operations that count bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy.typing as npt
import tensorflow as tf

from labkit.communicator import Communicator

Way: TypeAlias = Literal["forward", "backward"]
Batch: TypeAlias = npt.NDArray[Any]  # axis 0: rows
# The return type of functions for `tf.custom_gradient`: the result and the gradient function.
WithGradient: TypeAlias = tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]


class LayerRow(TypedDict):
    """One rank's report on a layer: how it is divided, and the bytes sent per training step.

    `slices` describes how the layer is divided; `why` gives the reason if it is not divided.
    `kernels_bytes` counts the bytes sent to sum the gradients of shared kernels (only for models on
    a grid of machines).
    """

    layer: str
    slices: str
    why: str
    forward_bytes: float
    forward_wire_bytes: float
    backward_bytes: float
    backward_wire_bytes: float
    weights_bytes: int
    whole_weights_bytes: int
    kernels_bytes: NotRequired[float]


class Meter:
    """Byte counters of the messages of one layer.

    Attributes:
        communicator: Communicator of the ranks among which the layer is divided.
        payload: Total bytes that this rank passed to the communicator, with keys "forward" and
            "backward".
        wire: Total bytes of the messages that left this rank, with keys "forward" and "backward".
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.payload = {"forward": 0, "backward": 0}
        self.wire = {"forward": 0, "backward": 0}

    def run_counted(
        self, call: Callable[[Batch], Batch], x: tf.Tensor, way: Way, shape: Sequence[int | None]
    ) -> tf.Tensor:
        """Run a communicating function as a TensorFlow operation, and return its result.

        TensorFlow runs communicating operations in the order in which they were traced, which is
        the same on all ranks. All ranks send and receive messages in trace order, so no deadlock
        can arise.
        """

        def counted(value: Batch) -> Batch:
            before = self.communicator.traffic.copy()
            result = call(value)
            spent = self.communicator.traffic.since(before)
            self.payload[way] += spent.payload_bytes
            self.wire[way] += spent.wire_bytes
            return result

        # The operation made by `tf.numpy_function` has no gradient; callers define one with
        # `tf.custom_gradient`.
        y = tf.numpy_function(counted, [x], x.dtype)
        y.set_shape(shape)
        return y


@contextmanager
def uncounted(meters: Iterable[Meter]) -> Iterator[None]:
    """Context manager during which the given meters count no bytes."""
    before = [(meter, dict(meter.payload), dict(meter.wire)) for meter in meters]
    try:
        yield
    finally:
        for meter, payload, wire in before:
            meter.payload, meter.wire = payload, wire


def layer_row(
    layer: str,
    slices: str,
    reason: str,
    meter: Meter | None,
    steps: int,
    local_bytes: int = 0,
    total_bytes: int = 0,
) -> LayerRow:
    """Return the `LayerRow` of a layer, with message bytes as means per training step.

    Args:
        layer, slices: Name of the layer, and a description of how it is divided.
        reason: Why the layer is not divided, the field `why` of `LayerRow`.
        meter: Byte counters of the layer; None if the layer sends nothing.
        steps: Number of training steps so far.
        local_bytes: Bytes of the layer's weights on this rank.
        total_bytes: Bytes of the weights of the whole, undivided layer.
    """
    payload, wire = (meter.payload, meter.wire) if meter else ({}, {})
    return LayerRow(
        layer=layer,
        slices=slices,
        why=reason,
        forward_bytes=payload.get("forward", 0) / steps,
        forward_wire_bytes=wire.get("forward", 0) / steps,
        backward_bytes=payload.get("backward", 0) / steps,
        backward_wire_bytes=wire.get("backward", 0) / steps,
        weights_bytes=local_bytes,
        whole_weights_bytes=total_bytes,
    )
