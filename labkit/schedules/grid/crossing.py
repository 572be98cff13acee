"""Values that one machine of a grid sends to others: one copy for every machine that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.schedules.grid.layer import Boxes, Grid, GridLayer, input_boxes, owned_boxes
from labkit.schedules.round import Booleans, Integers


@dataclass(frozen=True, eq=False)
class Crossing:
    """Messages, one per row: `source` sends a box of values to `destination`, which needs them.

    In the forward pass, all messages for a layer are sent before this layer computes. In the
    backward pass, each destination returns the gradients of the values that it read, and the source
    adds them. These gradients are sent only if an earlier layer has weights to train.

    Args:
        layer: Index, in the list of layers, of the layer that reads the values.
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
        """Return the values per sample that a machine sends for a layer: (forward, backward)."""
        of_layer = self.layer == layer
        forward = self.values[of_layer & (self.source == machine)].sum()
        return int(forward), int(self.values_back[of_layer & (self.destination == machine)].sum())

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return (layer, source, destination, values) of each message."""
        columns = (self.layer, self.source, self.destination, self.values)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def crossing(layers: Sequence[GridLayer], grid: Grid) -> Crossing:
    """Return the messages between machines, sorted by layer, source and destination.

        one row of six values, kernel 3, two machines: outputs 0 1 | 2 3 read 0…3 | 2…5

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
        # stop. The shape of start and stop is (source, destination, 3).
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
