"""Messages inside a model as TensorFlow operations, and how many bytes they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy.typing as npt
import tensorflow as tf

from labkit.communicator import Communicator

Way: TypeAlias = Literal["forward", "backward"]
Batch: TypeAlias = npt.NDArray[Any]  # rows first
# What a function gives to `tf.custom_gradient`: its result, and what makes gradients of gradients.
WithGradient: TypeAlias = tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]


class LayerRow(TypedDict):
    """What a rank has of one layer, and what the layer has sent, in bytes a step.

    `slices` says how the layer was cut, `why` why it was not; `kernels_bytes` is what the sums of
    gradients of shared kernels took, over a grid of machines.
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
    """Counts what one layer sends.

    Attributes:
        communicator: the ranks that share the layer.
        payload: bytes that this rank has handed over so far, by "forward" and "backward".
        wire: bytes that have left it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.payload = {"forward": 0, "backward": 0}
        self.wire = {"forward": 0, "backward": 0}

    def metered(
        self, call: Callable[[Batch], Batch], x: tf.Tensor, way: Way, shape: Sequence[int | None]
    ) -> tf.Tensor:
        """The result of a call that exchanges messages, of this shape, as an operation.

        TensorFlow runs such operations in the order of the trace, which is the same on all ranks:
        so they meet in the same messages, and none waits for one that comes later.
        """

        def counted(value: Batch) -> Batch:
            before = self.communicator.traffic.copy()
            result = call(value)
            spent = self.communicator.traffic.since(before)
            self.payload[way] += spent.payload_bytes
            self.wire[way] += spent.wire_bytes
            return result

        # It has no gradient: who calls this gives one by `tf.custom_gradient`.
        y = tf.numpy_function(counted, [x], x.dtype)
        y.set_shape(shape)
        return y


@contextmanager
def uncounted(meters: Iterable[Meter]) -> Iterator[None]:
    """What crosses in here is not counted."""
    before = [(meter, dict(meter.payload), dict(meter.wire)) for meter in meters]
    try:
        yield
    finally:
        for meter, payload, wire in before:
            meter.payload, meter.wire = payload, wire


def layer_row(
    layer: str,
    slices: str,
    why: str,
    meter: Meter | None,
    steps: int,
    own: int = 0,
    whole: int = 0,
) -> LayerRow:
    """What is known of a layer after so many steps.

    Args:
        layer, slices, why: as of `LayerRow`.
        meter: counts what it sends; None: it sends nothing.
        steps: taken so far.
        own: bytes of this rank's weights.
        whole: bytes of all its weights.
    """
    payload, wire = (meter.payload, meter.wire) if meter else ({}, {})
    return LayerRow(
        layer=layer,
        slices=slices,
        why=why,
        forward_bytes=payload.get("forward", 0) / steps,
        forward_wire_bytes=wire.get("forward", 0) / steps,
        backward_bytes=payload.get("backward", 0) / steps,
        backward_wire_bytes=wire.get("backward", 0) / steps,
        weights_bytes=own,
        whole_weights_bytes=whole,
    )
