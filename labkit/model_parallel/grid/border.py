"""What one machine of a grid sends and receives before a layer, as places in its own arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from labkit.model_parallel.meter import Batch
from labkit.schedules.grid import Boxes, Crossing

Place = tuple[slice, ...]


class Border:
    """From what a machine holds of a layer to what it reads of it.

    Args:
        machine: its number.
        crossing: what crosses before all layers.
        number: the reading layer's place among them.
        held, read: what this machine holds of the layer before, and reads of it: (3, 2).

    Attributes:
        own, whole: rows, columns and channels of what it holds and of what it reads.
        out: to whom values go, and where they are in what it holds.
        come: from whom values come, and where they go in what it reads.
    """

    def __init__(
        self, machine: int, crossing: Crossing, number: int, held: Boxes, read: Boxes
    ) -> None:
        self.own, self.whole = extent(held), extent(read)
        here = crossing.layer == number
        out = here & (crossing.source == machine)
        come = here & (crossing.destination == machine)
        self.out = _places(crossing.destination[out], crossing.box[out], held)
        self.come = _places(crossing.source[come], crossing.box[come], read)
        # What a machine holds and reads itself never becomes a message.
        stays = np.stack([np.maximum(held, read)[:, 0], np.minimum(held, read)[:, 1]], axis=1)
        stays = np.maximum(stays, stays[:, :1])  # nothing, where this machine reads nothing
        self._kept, self._kept_as = _place(stays, held), _place(stays, read)

    def inside(self, x: Batch) -> Batch:
        """What it reads, of what it holds alone; both (batch, rows, columns, channels)."""
        found = np.zeros((len(x), *self.whole), x.dtype)
        found[self._kept_as] = x[self._kept]
        return found

    def back(self, gradient: Batch) -> Batch:
        """The gradient of what it holds, as far as it has read that itself."""
        found = np.zeros((len(gradient), *self.own), gradient.dtype)
        found[self._kept] = gradient[self._kept_as]
        return found


def _places(machines: npt.NDArray[np.int64], boxes: Boxes, frame: Boxes) -> list[tuple[int, Place]]:
    """Where in the frame each machine's box lies."""
    return [(int(who), _place(box, frame)) for who, box in zip(machines, boxes, strict=True)]


def _place(box: Boxes, frame: Boxes) -> Place:
    start, stop = (box - frame[:, :1]).T.tolist()
    return (slice(None), *(slice(a, b) for a, b in zip(start, stop, strict=True)))


def extent(box: Boxes) -> tuple[int, ...]:
    """Rows, columns and channels of a box."""
    return tuple((box[:, 1] - box[:, 0]).tolist())
