"""Values that cross between machines of a grid: each once for every machine that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.schedules.grid.layer import Boxes, Grid, Layer, held, read
from labkit.schedules.round import Booleans, Integers


@dataclass(frozen=True, eq=False)
class Crossing:
    """Messages, a row each: `source` sends a box of values to `destination`, which reads them.

    Forward all rows of a layer travel before it computes. Backward the gradients of the same
    values travel from destination to source, where they add up; only where a layer before has
    weights that wait for them.

    Args: columns of equal length: layer: the reading one's place in the list; source, destination:
    machines; box: (rows, 3, 2), from and to of rows, columns, channels in the layer before;
    returns: whether gradients come back.
    """

    layer: Integers
    source: Integers
    destination: Integers
    box: Boxes
    returns: Booleans

    def __len__(self) -> int:
        """Number of messages forward, for one batch."""
        return len(self.source)

    @property
    def values(self) -> Integers:
        """Numbers in each message forward, for one sample."""
        sizes: Integers = (self.box[:, :, 1] - self.box[:, :, 0]).prod(axis=1)
        return sizes

    @property
    def values_back(self) -> Integers:
        """Numbers in each message backward, for one sample."""
        return np.where(self.returns, self.values, 0)

    def sent(self, machine: int, layer: int) -> tuple[int, int]:
        """Values a sample that a machine sends before a layer: forward, and gradients backward."""
        here = self.layer == layer
        forward = self.values[here & (self.source == machine)].sum()
        return int(forward), int(self.values_back[here & (self.destination == machine)].sum())

    def rows(self) -> list[tuple[int, int, int, int]]:
        """(layer, source, destination, values) of each message."""
        columns = (self.layer, self.source, self.destination, self.values)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def crossing(layers: Sequence[Layer], grid: Grid) -> Crossing:
    """The values that cross, in order of layers, sources and destinations.

        one row of six values, kernel 3, two machines: outputs 0 1 | 2 3 read 0…3 | 2…5

        machine 0   0 1 2 ─┐   ┌─ holds 0 1 2, reads 0 1 2 3
        machine 1   3 4 5 ─┴───┴─ holds 3 4 5, reads 2 3 4 5       0 sends 2, 1 sends 3

    The input is on all machines: nothing crosses before the first layer.

    Args: layers: from the input to the loss; grid: rows and columns of machines.
    """
    machines = grid[0] * grid[1]
    columns: list[tuple[Integers, ...]] = [(np.empty(0, np.int64),) * 3]
    boxes = [np.empty((0, 3, 2), np.int64)]
    for number in range(2, len(layers)):
        before = layers[number - 1]
        has, wants = held(before, grid), read(layers[number], before.shape, grid)
        # Boxes overlap where the greater of their begins lies before the lesser of their ends.
        start = np.maximum(has[:, None, :, 0], wants[None, :, :, 0])  # (source, destination, 3)
        stop = np.minimum(has[:, None, :, 1], wants[None, :, :, 1])
        crosses = (stop > start).all(axis=2) & ~np.eye(machines, dtype=np.bool_)
        source, destination = np.nonzero(crosses)
        columns.append((np.full(len(source), number), source, destination))
        boxes.append(np.stack([start[crosses], stop[crosses]], axis=2))
    layer, source, destination = map(np.concatenate, zip(*columns, strict=True))
    returns = layer > first_trained(layers)
    return Crossing(layer, source, destination, np.concatenate(boxes), returns)


def first_trained(layers: Sequence[Layer]) -> int:
    """The place of the first layer with weights: up to it nobody asks for gradients of values."""
    return next((n for n, layer in enumerate(layers) if n and layer.trains), len(layers))
