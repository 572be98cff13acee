"""The values of one layer that cross between machines, as an operation with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.meter import Batch, Meter, WithGradient
from labkit.schedules.grid import Boxes, Crossing

if TYPE_CHECKING:
    from mpi4py import MPI

Place = tuple[slice, ...]


class Halo(Meter):
    """From what each machine holds of a layer to what each reads of it.

    Forward, a machine sends each other one the values that this one reads, in one message, and
    puts what it receives around its own. Backward the gradients of the same values return, and
    add up in order of machines. All send before any waits, so that none waits in a circle.

    Args:
        communicator: the machines of one replica.
        crossing: what crosses before all layers.
        number: the reading layer's place among them.
        held, read: what this machine holds of the layer before, and reads of it: (3, 2).
    """

    def __init__(
        self, communicator: Communicator, crossing: Crossing, number: int, held: Boxes, read: Boxes
    ) -> None:
        super().__init__(communicator)
        self._number = number
        self._own, self._whole = extent(held), extent(read)
        here = crossing.layer == number
        out = here & (crossing.source == communicator.rank)
        come = here & (crossing.destination == communicator.rank)
        self._out = _places(crossing.destination[out], crossing.box[out], held)
        self._in = _places(crossing.source[come], crossing.box[come], read)
        # What a machine holds and reads itself never becomes a message.
        stays = np.stack([np.maximum(held, read)[:, 0], np.minimum(held, read)[:, 1]], axis=1)
        stays = np.maximum(stays, stays[:, :1])  # nothing, where this machine reads nothing
        self._kept, self._kept_as = _place(stays, held), _place(stays, read)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """What this machine reads, of what it holds; both (batch, rows, columns, channels)."""

        def exchange(x: tf.Tensor) -> WithGradient:
            rows = x.shape[0]
            y = self.metered(self._forward, x, "forward", [rows, *self._whole])
            return y, lambda gradient: self.metered(
                self._backward, gradient, "backward", [rows, *self._own]
            )

        return tf.custom_gradient(exchange)(x)

    def _forward(self, x: Batch) -> Batch:
        found = np.zeros((len(x), *self._whole), x.dtype)
        posted = self._send(x, self._out, 0)
        found[self._kept_as] = x[self._kept]
        for source, there in self._in:
            found[there] = self._receive(found[there], source, 0)
        self.communicator.finish(posted)
        return found

    def _backward(self, gradient: Batch) -> Batch:
        found = np.zeros((len(gradient), *self._own), gradient.dtype)
        posted = self._send(gradient, self._in, 1)
        found[self._kept] = gradient[self._kept_as]
        for source, mine in self._out:
            found[mine] += self._receive(found[mine], source, 1)
        self.communicator.finish(posted)
        return found

    def _send(self, x: Batch, places: Sequence[tuple[int, Place]], way: int) -> list[MPI.Request]:
        tag = 2 * self._number + way
        posted: list[MPI.Request] = []
        for machine, place in places:
            posted += self.communicator.post(np.ascontiguousarray(x[place]), machine, tag)
        return posted

    def _receive(self, like: Batch, source: int, way: int) -> Batch:
        data = np.empty(like.shape, like.dtype)
        self.communicator.recv(data, source, 2 * self._number + way)
        return data


def _places(machines: npt.NDArray[np.int64], boxes: Boxes, frame: Boxes) -> list[tuple[int, Place]]:
    """Where in the frame each machine's box lies."""
    return [(int(who), _place(box, frame)) for who, box in zip(machines, boxes, strict=True)]


def _place(box: Boxes, frame: Boxes) -> Place:
    start, stop = (box - frame[:, :1]).T.tolist()
    return (slice(None), *(slice(a, b) for a, b in zip(start, stop, strict=True)))


def extent(box: Boxes) -> tuple[int, ...]:
    """Rows, columns and channels of a box."""
    return tuple((box[:, 1] - box[:, 0]).tolist())
