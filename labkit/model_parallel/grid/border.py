"""The values that a machine sends and receives before a layer, as index ranges of arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from labkit.model_parallel.meter import Batch
from labkit.schedules.grid import Boxes, Crossing

Place = tuple[slice, ...]


class Border:
    """Index ranges that relate the values that a machine owns to the values that its layer reads.

    Args:
        machine: Number of this machine in the grid.
        crossing: Index ranges of the values that machines exchange before each layer of the model.
        number: Index in the model of the layer that reads the values.
        held, read: Index ranges (start and end on each axis) of the previous layer's outputs that
            this machine owns and reads; arrays of shape (3, 2).

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
        local = np.maximum(local, local[:, :1])  # if nothing is read, the index range is empty
        self._local_source, self._local_target = _place(local, held), _place(local, read)

    def inside(self, x: Batch) -> Batch:
        """Return the array of values to read: those that this machine owns, and zeros elsewhere.

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
    """Return pairs: a machine, and the index of its values in the array that covers `frame`."""
    return [(int(m), _place(box, frame)) for m, box in zip(machines, boxes, strict=True)]


def _place(box: Boxes, frame: Boxes) -> Place:
    start, stop = (box - frame[:, :1]).T.tolist()
    return (slice(None), *(slice(a, b) for a, b in zip(start, stop, strict=True)))


def extent(box: Boxes) -> tuple[int, ...]:
    """Return the numbers of rows, columns and channels of an index range."""
    return tuple((box[:, 1] - box[:, 0]).tolist())
