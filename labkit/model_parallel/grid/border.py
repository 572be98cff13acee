"""The values that a machine sends and receives before each layer, as indices into arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from labkit.model_parallel.meter import Batch
from labkit.schedules.grid import Boxes, Crossing

Place = tuple[slice, ...]


class Border:
    """Index ranges that map a machine's owned layer outputs to the values that it reads.

    Args:
        machine: Number of the machine.
        crossing: Boxes of values that machines exchange before the layers of the model.
        number: Index in the model of the layer that reads the values.
        held, read: Boxes (start and end on each axis) of the previous layer's output that this
            machine owns and reads, shape (3, 2).

    Attributes:
        owned_shape, read_shape: Numbers of rows, columns and channels that are owned and read.
        out: For each receiving machine: its number, and its values' index in the owned array.
        come: For each sending machine: its number, and its values' index in the read array.
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
        local = np.maximum(local, local[:, :1])  # the box is empty if nothing is read
        self._local_source, self._local_target = _place(local, held), _place(local, read)

    def inside(self, x: Batch) -> Batch:
        """Return the array of read values, filled where this machine owns them; zeros elsewhere.

        Both arrays have the shape (batch, rows, columns, channels).
        """
        result = np.zeros((len(x), *self.read_shape), x.dtype)
        result[self._local_target] = x[self._local_source]
        return result

    def back(self, gradient: Batch) -> Batch:
        """Return the gradient of owned values that this machine itself reads; zeros elsewhere."""
        result = np.zeros((len(gradient), *self.owned_shape), gradient.dtype)
        result[self._local_source] = gradient[self._local_target]
        return result


def _places(machines: npt.NDArray[np.int64], boxes: Boxes, frame: Boxes) -> list[tuple[int, Place]]:
    """Return each machine with the index of its box in the array that covers `frame`."""
    return [(int(m), _place(box, frame)) for m, box in zip(machines, boxes, strict=True)]


def _place(box: Boxes, frame: Boxes) -> Place:
    start, stop = (box - frame[:, :1]).T.tolist()
    return (slice(None), *(slice(a, b) for a, b in zip(start, stop, strict=True)))


def extent(box: Boxes) -> tuple[int, ...]:
    """Return the numbers of rows, columns and channels of a box."""
    return tuple((box[:, 1] - box[:, 0]).tolist())
