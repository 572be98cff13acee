"""A neural network on a grid of machines: the values that each machine owns, reads and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.round import Booleans, Integers, boundaries

Grid: TypeAlias = tuple[int, int]  # A `Grid` holds the numbers of rows and columns of machines.
# A `Shape` holds the numbers of rows, columns and channels of one sample.
Shape: TypeAlias = tuple[int, int, int]
# `Boxes` has the shape (machines, 3, 2): start and end of each machine's rows, columns and
# channels.
Boxes: TypeAlias = Integers
Kind: TypeAlias = Literal["input", "places", "units", "loss"]


@dataclass(frozen=True)
class GridLayer:
    """The output shape of a layer, and the part of its input that each output reads.

        kind    a machine owns        an output reads
        input   everything            nothing
        places  a tile, all channels  the rows and columns under its kernel, all channels
        units   some channels         everything
        loss    all, on machine 0     everything, on machine 0

    Machine (i, j) of an r × c grid has the number i c + j. Machine (i, j) owns tile (i, j) of every
    layer of kind "places". Each layer of the kind "units" is divided among all machines. Each
    machine of an r × c grid has one part. The sizes of two parts of a layer differ by at most one.

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
    r"""Return an unpadded layer whose output row i reads input rows from i · stride on.

    Raises:
        InvalidInput: If the kernel is larger than the input. A stride larger than the kernel is
            also an error, because the layer skips values.
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
        # A machine without outputs of a layer reads no inputs. Only machine 0 has the output of the
        # loss.
        boxes[:, :, 1] = np.where(boxes[:, :, 1] > 0, before, 0)
    return boxes


def _parts(length: int, parts: int) -> Integers:
    """Divide a length into nearly equal parts; return their starts and ends, shape (parts, 2)."""
    edges = boundaries(length, parts)
    return np.stack([edges[:-1], edges[1:]], axis=1)


def _by(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} × {sizes[1]}"


SHOWN = 6  # An error message lists at most `SHOWN` allowed grids.


def allowed_grids(layers: Sequence[GridLayer], workers: int, divide: bool = True) -> list[Grid]:
    """Return the grids that fit `workers` and give each machine a part of each layer.

    Args:
        layers: Layers of the neural network.
        workers: Total number of workers; workers / (machines of the grid) is the number of model
            replicas.
        divide: Whether the number of machines must divide `workers`. If False, a grid may have any
            number of machines up to `workers`.
    """
    machines = [n for n in range(1, workers + 1) if not divide or workers % n == 0]
    grids = [(r, n // r) for n in machines for r in range(1, n + 1) if n % r == 0]
    return [grid for grid in grids if _too_small(layers, grid) is None]


def squarest_grid(workers: int) -> Grid:
    """Return the grid of all workers that is closest to a square, with rows ≤ columns.

    squarest_grid(6) = (2, 3)
    """
    rows = max(r for r in range(1, workers + 1) if workers % r == 0 and r * r <= workers)
    return rows, workers // rows


def validate_grid(grid: Grid, workers: int | None, layers: Sequence[GridLayer] = ()) -> None:
    """Raise an error if the grid's size does not divide `workers` or if a layer is too small.

    Args:
        grid: Numbers of rows and columns of machines.
        workers: Total number of workers. If None, a grid may have any number of machines.
        layers: Known layers of the neural network; may be empty.

    Raises:
        InvalidInput: If the grid does not fit; the message lists the closest allowed grids.
    """
    machines = grid[0] * grid[1]
    smallest = _too_small(layers, grid)
    if workers is not None and workers % machines:
        cause = f"has {machines} machines, but workers={workers} is not a multiple of {machines}"
    elif smallest is not None:
        what = {"places": "{0} × {1} places", "units": "{2} units"}[smallest.kind]
        cause = f"is larger than layer {smallest.name!r} of {what.format(*smallest.shape)}"
    else:
        return

    def distance(candidate: Grid) -> tuple[int, int]:
        sides = abs(candidate[0] - grid[0]) + abs(candidate[1] - grid[1])
        return sides, abs(candidate[0] * candidate[1] - machines)

    # The error message lists only allowed grids near the given grid, because the complete list can
    # be long.
    allowed = allowed_grids(layers, workers or machines, divide=workers is not None)
    nearest = sorted(allowed, key=distance)
    more = " …" if len(nearest) > SHOWN else ""
    raise InvalidInput(
        f"grid={grid} {cause}; allowed: {', '.join(map(str, nearest[:SHOWN]))}{more}"
    )


def _too_small(layers: Sequence[GridLayer], grid: Grid) -> GridLayer | None:
    """Return the first layer that is too small to give every machine a part, or None."""
    for layer in layers:
        rows, columns, units = layer.shape
        if layer.kind == "places" and (rows < grid[0] or columns < grid[1]):
            return layer
        if layer.kind == "units" and units < grid[0] * grid[1]:
            return layer
    return None


@dataclass(frozen=True, eq=False)
class Crossing:
    """Table of messages; in each message, `source` sends a box of values to `destination`.

    In the forward pass, all messages for a layer are sent before this layer computes. In the
    backward pass, each destination returns the gradients of the values that it read. The source
    adds the gradients from all destinations. The destinations send gradients back only if an
    earlier layer has weights to train.

    Args:
        layer: Index of the layer that reads the values.
        source, destination: Numbers of the sending and of the receiving machine.
        box: Ranges of rows, columns and channels in the previous layer, shape (messages, 3, 2).
        returns: Whether the destination sends gradients of the values back.
    """

    layer: Integers
    source: Integers
    destination: Integers
    box: Boxes
    returns: Booleans

    def __len__(self) -> int:
        """Number of messages in the forward pass of one batch."""
        return len(self.source)

    @property
    def values(self) -> Integers:
        """Number of values in each forward message, for one sample."""
        sizes: Integers = (self.box[:, :, 1] - self.box[:, :, 0]).prod(axis=1)
        return sizes

    @property
    def values_back(self) -> Integers:
        """Number of values in each backward message, for one sample."""
        return np.where(self.returns, self.values, 0)

    def sent(self, machine: int, layer: int) -> tuple[int, int]:
        """Return how many values per sample a machine sends for a layer: (forward, backward)."""
        of_layer = self.layer == layer
        forward = self.values[of_layer & (self.source == machine)].sum()
        return int(forward), int(self.values_back[of_layer & (self.destination == machine)].sum())

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return (layer, source, destination, values) of each message."""
        columns = (self.layer, self.source, self.destination, self.values)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def crossing(layers: Sequence[GridLayer], grid: Grid) -> Crossing:
    """Return the messages between machines, sorted by layer, source and destination.

        Six values, kernel 3, two machines: outputs 0 1 read 0…3, outputs 2 3 read 2…5

        machine 0   0 1 2 ─┐   ┌─ holds 0 1 2, reads 0 1 2 3
        machine 1   3 4 5 ─┴───┴─ holds 3 4 5, reads 2 3 4 5       0 sends 2, 1 sends 3

    Every machine has the complete input, so no values are sent before the first layer.

    Args:
        layers: All layers, from the input to the loss.
        grid: Numbers of rows and columns of machines.
    """
    machines = grid[0] * grid[1]
    columns: list[tuple[Integers, ...]] = [(np.empty(0, np.int64),) * 3]
    boxes = [np.empty((0, 3, 2), np.int64)]
    for number in range(2, len(layers)):
        before = layers[number - 1]
        owned, required = owned_boxes(before, grid), input_boxes(layers[number], before.shape, grid)
        # The boxes of a source and a destination overlap if the larger start is below the smaller
        # stop. The arrays `start` and `stop` have the shape (source machines, destination machines,
        # 3 axes).
        start = np.maximum(owned[:, None, :, 0], required[None, :, :, 0])
        stop = np.minimum(owned[:, None, :, 1], required[None, :, :, 1])
        crosses = (stop > start).all(axis=2) & ~np.eye(machines, dtype=np.bool_)
        source, destination = np.nonzero(crosses)
        columns.append((np.full(len(source), number), source, destination))
        boxes.append(np.stack([start[crosses], stop[crosses]], axis=2))
    layer, source, destination = map(np.concatenate, zip(*columns, strict=True))
    returns = layer > first_trained_layer(layers)
    return Crossing(layer, source, destination, np.concatenate(boxes), returns)


def first_trained_layer(layers: Sequence[GridLayer]) -> int:
    """Return the index of the first trained layer; earlier layers need no gradients."""
    return next((n for n, layer in enumerate(layers) if n and layer.trains), len(layers))


__all__ = [
    "Boxes",
    "Crossing",
    "Grid",
    "GridLayer",
    "Shape",
    "allowed_grids",
    "crossing",
    "first_trained_layer",
    "input_boxes",
    "owned_boxes",
    "squarest_grid",
    "validate_grid",
    "window",
]
