"""Messages between parts of a divided model: byte counts, sums over slices, and halo exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.schedules import boundaries
from labkit.schedules.grid_layers import Boxes, Crossing

if TYPE_CHECKING:
    from mpi4py import MPI


Way: TypeAlias = Literal["forward", "backward"]
Batch: TypeAlias = npt.NDArray[Any]  # axis 0: rows
# The type `WithGradient` is the return type of functions for `tf.custom_gradient`: the result and
# the gradient function.
WithGradient: TypeAlias = tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]


class LayerRow(TypedDict):
    """One rank's report on a layer: how it is divided, and the bytes sent per training step.

    `slices` describes how the layer is divided; `why` gives the reason if it is not divided.
    For models on a grid, machines sum the gradients of shared kernels. The field `kernels_bytes`
    counts the bytes of messages with kernel gradients.
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

        TensorFlow runs communicating operations in the order of their traces. The order of the
        traces is the same on all ranks. All ranks send and receive messages in trace order, so no
        deadlock can arise.
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
        reason: Reason why the layer is not divided, stored in the field `why` of `LayerRow`.
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


class Link(Meter):
    """Collectives between the slices of a layer, as TensorFlow operations with gradients.

                 forward        backward
        spread   identity       allreduce
        total    allreduce      identity
        join     allgather      local part

    Args:
        communicator: Communicator of the ranks that have the slices of one replica.
        algorithm: Allreduce algorithm, see `Communicator.allreduce`.
        number: Number of the layer, which error messages about its collectives contain.
    """

    def __init__(self, communicator: Communicator, algorithm: str, number: int) -> None:
        super().__init__(communicator)
        self.rank, self.size = communicator.rank, communicator.size
        self._algorithm, self._number = algorithm, number

    def local_range(self, length: int) -> slice:
        """Return this slice's range among `length` units; slice sizes differ by at most one."""
        edges = boundaries(length, self.size)
        return slice(int(edges[self.rank]), int(edges[self.rank + 1]))

    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """Return x, which all slices read; the gradient of x is summed over all slices."""

        def identity(x: tf.Tensor) -> WithGradient:
            return tf.identity(x), lambda gradient: self._sum(gradient, "backward")

        return tf.custom_gradient(identity)(x)

    def total(self, x: tf.Tensor) -> tf.Tensor:
        """Return the sum of x over all slices; each slice receives the sum's gradient unchanged."""

        def allreduce(x: tf.Tensor) -> WithGradient:
            return self._sum(x, "forward"), lambda gradient: gradient

        return tf.custom_gradient(allreduce)(x)

    def join(self, x: tf.Tensor, length: int) -> tf.Tensor:
        """Concatenate the tensors of all slices along the last axis."""
        local = self.local_range(length)

        def allgather(x: tf.Tensor) -> WithGradient:
            return self._gather(x, length), lambda gradient: gradient[..., local]

        return tf.custom_gradient(allgather)(x)

    def _sum(self, x: tf.Tensor, way: Way) -> tf.Tensor:
        def call(value: Batch) -> Batch:
            buffer = np.array(value, order="C")
            self.communicator.allreduce(buffer, self._algorithm, self._place(way))
            return buffer

        return self.run_counted(call, x, way, x.shape)

    def _gather(self, x: tf.Tensor, length: int) -> tf.Tensor:
        edges = [int(edge) for edge in boundaries(length, self.size)]

        def call(value: Batch) -> Batch:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            place = self._place("forward")
            chunks = self.communicator.gather_bytes(data, self._algorithm, place)
            parts = [
                part.view(value.dtype).reshape(*value.shape[:-1], stop - start)
                for part, (start, stop) in zip(chunks, pairwise(edges), strict=True)
            ]
            return np.concatenate(parts, axis=-1)

        return self.run_counted(call, x, "forward", [*x.shape[:-1], length])

    def _place(self, way: Way) -> str:
        return f"the {way} pass of sliced layer {self._number}"


Place = tuple[slice, ...]


class Border:
    """Index ranges that map the values a machine owns to the values that its layer reads.

    Args:
        machine: Number of this machine in the grid.
        crossing: Index ranges of the values that machines exchange before each layer of the model.
        number: Index of the layer that reads the values, in the order of the model's layers.
        held, read: Index ranges of the outputs that this machine owns or reads. The previous layer
            computes the outputs. Each array of shape (3, 2) contains start and end per axis.

    Attributes:
        owned_shape, read_shape: Numbers of rows, columns and channels of the values that the
            machine owns and reads.
        out: List of (receiving machine, index of the sent values in the array of owned values).
        come: List of (sending machine, index of the received values in the array of read values).
    """

    def __init__(
        self, machine: int, crossing: Crossing, number: int, held: Boxes, read: Boxes
    ) -> None:
        self.owned_shape, self.read_shape = extent(held), extent(read)
        before_layer = crossing.layer == number
        out = before_layer & (crossing.source == machine)
        come = before_layer & (crossing.destination == machine)
        self.out = _places(crossing.destination[out], crossing.box[out], held)
        self.come = _places(crossing.source[come], crossing.box[come], read)
        # A machine sends no message for values that it both owns and reads.
        local = np.stack([np.maximum(held, read)[:, 0], np.minimum(held, read)[:, 1]], axis=1)
        # A machine may own none of the values that it reads. The index range then becomes empty
        # instead of negative.
        local = np.maximum(local, local[:, :1])
        self._local_source, self._local_target = _place(local, held), _place(local, read)

    def inside(self, x: Batch) -> Batch:
        """Return the array of values to read, with zeros where another machine owns the values.

        The argument and the result have the shape (batch, rows, columns, channels).
        """
        result = np.zeros((len(x), *self.read_shape), x.dtype)
        result[self._local_target] = x[self._local_source]
        return result

    def back(self, gradient: Batch) -> Batch:
        """Return gradients of the owned values that this machine itself reads; zeros elsewhere."""
        result = np.zeros((len(gradient), *self.owned_shape), gradient.dtype)
        result[self._local_source] = gradient[self._local_target]
        return result


def _places(machines: npt.NDArray[np.int64], boxes: Boxes, frame: Boxes) -> list[tuple[int, Place]]:
    """Return pairs (machine, index range of its values), with indices relative to `frame`."""
    return [(int(m), _place(box, frame)) for m, box in zip(machines, boxes, strict=True)]


def _place(box: Boxes, frame: Boxes) -> Place:
    start, stop = (box - frame[:, :1]).T.tolist()
    return (slice(None), *(slice(a, b) for a, b in zip(start, stop, strict=True)))


def extent(box: Boxes) -> tuple[int, ...]:
    """Return the numbers of rows, columns and channels of an index range."""
    return tuple((box[:, 1] - box[:, 0]).tolist())


class Halo(Meter):
    """The exchange of a layer's outputs that gives each machine the values that it reads.

    In the forward pass, machines send their values to the machines that read them. Each receiver
    gets one message. A machine inserts the received values around the values that it owns. In the
    backward pass, the gradients of the exchanged values return to the owners. Each owner adds the
    received gradients in the order of machine numbers. All machines send before any machine waits,
    so no deadlock can arise.

    Args:
        communicator: Communicator of the machines (ranks) of one replica.
        border: Index ranges of the values that this machine sends and receives.
        number: Index of the layer that reads the values, in the order of the model's layers.
    """

    def __init__(self, communicator: Communicator, border: Border, number: int) -> None:
        super().__init__(communicator)
        self._border, self._number = border, number

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Return the values that this machine reads, given the tensor x of values that it owns.

        The argument and the result have the shape (batch, rows, columns, channels).
        """
        border = self._border

        def exchange(x: tf.Tensor) -> WithGradient:
            rows = x.shape[0]
            y = self.run_counted(self._forward, x, "forward", [rows, *border.read_shape])
            return y, lambda gradient: self.run_counted(
                self._backward, gradient, "backward", [rows, *border.owned_shape]
            )

        return tf.custom_gradient(exchange)(x)

    def _forward(self, x: Batch) -> Batch:
        requests = self._send(x, self._border.out, 0)
        values = self._border.inside(x)
        for source, index in self._border.come:
            values[index] = self._receive(values[index], source, 0)
        self.communicator.finish(requests)
        return values

    def _backward(self, gradient: Batch) -> Batch:
        requests = self._send(gradient, self._border.come, 1)
        result = self._border.back(gradient)
        for source, index in self._border.out:
            result[index] += self._receive(result[index], source, 1)
        self.communicator.finish(requests)
        return result

    def _send(self, x: Batch, places: Sequence[tuple[int, Place]], way: int) -> list[MPI.Request]:
        tag = 2 * self._number + way
        requests: list[MPI.Request] = []
        for machine, place in places:
            requests += self.communicator.post(np.ascontiguousarray(x[place]), machine, tag)
        return requests

    def _receive(self, like: Batch, source: int, way: int) -> Batch:
        data = np.empty(like.shape, like.dtype)
        self.communicator.recv(data, source, 2 * self._number + way)
        return data
