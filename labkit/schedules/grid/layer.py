"""A layer as machines in a grid see it: which values each of them holds, and which it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.round import Integers, boundaries

Grid: TypeAlias = tuple[int, int]  # rows and columns of machines
Shape: TypeAlias = tuple[int, int, int]  # rows, columns, channels of one sample
Boxes: TypeAlias = Integers  # (machines, 3, 2): from and to of rows, columns, channels
Kind: TypeAlias = Literal["input", "places", "units", "loss"]


@dataclass(frozen=True)
class Layer:
    """What a layer gives and what it reads of the layer before it; batches are left out.

        kind    a machine holds       an output reads
        input   everything            nothing
        places  a tile, all channels  the rows and columns under its kernel, all channels
        units   some channels         everything
        loss    on machine 0 all      everything, on machine 0

    Machine (i, j) of r × c is number i c + j and holds tile (i, j) of every layer of places; units
    are cut into r c parts. Sizes differ by one at most.

    Args: name: in messages; shape: of its output; kernel, strides: rows and columns, of places;
    trains: whether it has weights, whose gradients must come back.
    """

    name: str
    kind: Kind
    shape: Shape
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    trains: bool = True


def window(
    name: str,
    before: Shape,
    channels: int,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    trains: bool = True,
) -> Layer:
    r"""A layer whose output (i, j) reads rows \([i s, i s + k)\), columns likewise, unpadded.

    Raises: InvalidInput, where no kernel fits, or strides jump over values that nobody would read.
    """
    if any(k > size for k, size in zip(kernel, before[:2], strict=True)):
        raise InvalidInput(
            f"layer {name!r}: a kernel of {_by(kernel)} does not fit on {_by(before)} places; "
            f"allowed: up to {_by(before)}"
        )
    if any(s > k for s, k in zip(strides, kernel, strict=True)):
        raise InvalidInput(
            f"layer {name!r}: strides of {_by(strides)} jump over values beside a kernel of "
            f"{_by(kernel)}; allowed: up to {_by(kernel)}"
        )
    sizes = [(size - k) // s + 1 for size, k, s in zip(before[:2], kernel, strides, strict=True)]
    return Layer(name, "places", (sizes[0], sizes[1], channels), kernel, strides, trains)


def held(layer: Layer, grid: Grid) -> Boxes:
    """What each machine holds of the layer's output."""
    machines = grid[0] * grid[1]
    boxes = np.zeros((machines, 3, 2), np.int64)
    if layer.kind == "loss":
        boxes[0, :, 1] = layer.shape
        return boxes
    boxes[:, :, 1] = layer.shape
    if layer.kind == "units":
        boxes[:, 2] = _parts(layer.shape[2], machines)
    elif layer.kind == "places":
        boxes[:, 0] = np.repeat(_parts(layer.shape[0], grid[0]), grid[1], axis=0)
        boxes[:, 1] = np.tile(_parts(layer.shape[1], grid[1]), (grid[0], 1))
    return boxes


def read(layer: Layer, before: Shape, grid: Grid) -> Boxes:
    """What the outputs that each machine holds read of the layer before, of this shape."""
    boxes = held(layer, grid)
    if layer.kind == "places":
        for axis, (kernel, stride) in enumerate(zip(layer.kernel, layer.strides, strict=True)):
            boxes[:, axis] = boxes[:, axis] * stride
            boxes[:, axis, 1] += kernel - stride
        boxes[:, 2] = (0, before[2])
    else:
        boxes[:, :, 0] = 0
        # A machine without outputs, as for the loss all but machine 0, reads nothing.
        boxes[:, :, 1] = np.where(boxes[:, :, 1] > 0, before, 0)
    return boxes


def _parts(length: int, parts: int) -> Integers:
    """Where each part begins and ends, (parts, 2)."""
    edges = boundaries(length, parts)
    return np.stack([edges[:-1], edges[1:]], axis=1)


def _by(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} × {sizes[1]}"
