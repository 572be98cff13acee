"""A layer divided over a grid: the values that each machine owns and the values that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.round import Integers, boundaries

Grid: TypeAlias = tuple[int, int]  # rows and columns of machines
Shape: TypeAlias = tuple[int, int, int]  # rows, columns, channels of one sample
Boxes: TypeAlias = Integers  # (machines, 3, 2): start and end of rows, columns, channels
Kind: TypeAlias = Literal["input", "places", "units", "loss"]


@dataclass(frozen=True)
class GridLayer:
    """The output shape of a layer, and which part of its input each output reads, for one sample.

        kind    a machine owns        an output reads
        input   everything            nothing
        places  a tile, all channels  the rows and columns under its kernel, all channels
        units   some channels         everything
        loss    all, on machine 0     everything, on machine 0

    Machine (i, j) of an r × c grid has number i c + j and owns tile (i, j) of every layer of kind
    "places". Layers of kind "units" are divided into r · c parts, one for each machine of an r × c
    grid. The sizes of two parts of a layer differ by at most one.

    Args:
        name: Name of the layer in error messages.
        kind: How the layer is divided: "input", "places", "units" or "loss".
        shape: Output shape: rows, columns, channels.
        kernel, strides: Kernel size and strides (rows, columns), for kind "places".
        trains: Whether the layer has weights; if so, later layers must send gradients back.
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
) -> GridLayer:
    r"""Return an unpadded layer; output row i reads rows \([i s, i s + k)\) (stride s, kernel k).

    Raises:
        InvalidInput: If the kernel does not fit, or if the strides skip values that no output would
            read.
    """
    if any(k > size for k, size in zip(kernel, before[:2], strict=True)):
        raise InvalidInput(
            f"layer {name!r}: a kernel of {_by(kernel)} does not fit into {_by(before)} places; "
            f"allowed: up to {_by(before)}"
        )
    if any(s > k for s, k in zip(strides, kernel, strict=True)):
        raise InvalidInput(
            f"layer {name!r}: strides of {_by(strides)} skip values with a kernel of "
            f"{_by(kernel)}; allowed: up to {_by(kernel)}"
        )
    sizes = [(size - k) // s + 1 for size, k, s in zip(before[:2], kernel, strides, strict=True)]
    return GridLayer(name, "places", (sizes[0], sizes[1], channels), kernel, strides, trains)


def owned_boxes(layer: GridLayer, grid: Grid) -> Boxes:
    """Return the box of the layer's output that each machine owns, shape (machines, 3, 2)."""
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


def input_boxes(layer: GridLayer, before: Shape, grid: Grid) -> Boxes:
    """Return the box of values of the previous layer that each machine reads."""
    boxes = owned_boxes(layer, grid)
    if layer.kind == "places":
        for axis, (kernel, stride) in enumerate(zip(layer.kernel, layer.strides, strict=True)):
            boxes[:, axis] = boxes[:, axis] * stride
            boxes[:, axis, 1] += kernel - stride
        boxes[:, 2] = (0, before[2])
    else:
        boxes[:, :, 0] = 0
        # A machine without outputs reads nothing; for the loss, only machine 0 has an output.
        boxes[:, :, 1] = np.where(boxes[:, :, 1] > 0, before, 0)
    return boxes


def _parts(length: int, parts: int) -> Integers:
    """Divide a length into nearly equal parts; return their starts and ends, shape (parts, 2)."""
    edges = boundaries(length, parts)
    return np.stack([edges[:-1], edges[1:]], axis=1)


def _by(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} × {sizes[1]}"
