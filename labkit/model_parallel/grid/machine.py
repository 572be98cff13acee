"""The layers of one machine of a grid, and the index ranges of values that it owns and reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import keras
import tensorflow as tf

from labkit.model_parallel.grid.border import Border, extent
from labkit.model_parallel.grid.pieces import LayerPiece, cut
from labkit.model_parallel.weights import Place, WeightShard
from labkit.schedules.grid import Grid, GridLayer, crossing, input_boxes, owned_boxes


class GridMachine:
    """A machine's part of a model on a grid.

    Unshared kernels and Dense units are divided: a machine has the kernels and units of its own
    outputs. The kernel of a Conv2D, which all positions share, is whole on every machine. The
    local layers have new variables.

    Args:
        model: Sequential or functional model without branches, built.
        grid: Numbers of rows and columns of machines; every machine needs a position or a unit of
            each layer.
        number: Number of the machine.

    Attributes:
        number, others: Number of the machine, and count of the other machines.
        planes: Shapes and windows of all layers (`GridLayer`), from the input to the loss.
        pieces: Layers of the whole model after its input.
        local_layers: This machine's part of each layer in `pieces`.
        held: For each plane, the box of values that the machine owns.
        read: For each plane but the input, the box that the machine reads of the previous plane.
        borders: Values that the machine sends and receives before each layer and the loss.

    Raises:
        InvalidInput: If a layer cannot be divided.
    """

    def __init__(self, model: keras.Model, grid: Grid, number: int) -> None:
        self.number, self.others = number, grid[0] * grid[1] - 1
        self._input, *self.pieces = cut(model)
        self.planes = planes_of([self._input, *self.pieces])
        self.dtype = tf.as_dtype(model.compute_dtype)
        self.held = [owned_boxes(plane, grid)[number] for plane in self.planes]
        self.read = [  # for each layer, the box that it reads of the previous layer's output
            input_boxes(plane, before.shape, grid)[number]
            for before, plane in pairwise(self.planes)
        ]
        crosses, ends = crossing(self.planes, grid), zip(self.held, self.read, strict=False)
        self.borders = [
            Border(number, crosses, layer, *boxes) for layer, boxes in enumerate(ends, 1)
        ]
        self.local_layers = [
            self._build_layer(layer, piece) for layer, piece in enumerate(self.pieces, 1)
        ]

    def prepare_input(self, x: tf.Tensor) -> tf.Tensor:
        """Return the input of a batch, (batch, rows, columns, channels), equal on all machines."""
        rows, x = tf.shape(x)[0], tf.cast(tf.convert_to_tensor(x), self.dtype)
        x = shaped(x, rows, self.planes[0].shape)
        for layer in self._input.behind:
            x = layer(x)
        return x

    def pairs(self) -> Iterator[WeightShard]:
        """Yield each local weight of all layers, paired with the whole model's weight."""
        for number in range(len(self.pieces)):
            yield from self.pairs_of(number)

    def pairs_of(self, number: int) -> Iterator[WeightShard]:
        """Yield each local weight of layer `number`, paired with the whole model's weight."""
        place = self.place(number)
        variables = self.pieces[number].layer.variables, self.local_layers[number].variables
        for whole, local in zip(*variables, strict=True):
            yield WeightShard(whole, local, place)

    def trained_pairs(self, number: int) -> list[WeightShard]:
        """Return the pairs of local and whole weights of layer `number` that are trainable."""
        return [pair for pair in self.pairs_of(number) if pair.local.trainable]

    def owned_pairs(self) -> list[WeightShard]:
        """Return all trainable pairs that this machine owns; machine 0 owns shared kernels."""
        numbers = range(len(self.pieces))
        owned = [n for n in numbers if self.number == 0 or not self.shares(n)]
        return [pair for number in owned for pair in self.trained_pairs(number)]

    @property
    def shares_weights(self) -> bool:
        """Whether any trainable weights are shared by all machines."""
        return any(self.shares(n) and self.trained_pairs(n) for n in range(len(self.pieces)))

    def place(self, number: int) -> Place:
        """Return this machine's index in the kernel and the bias of layer `number`."""
        (top, bottom), (left, right), (first, last) = self.held[number + 1].tolist()
        if self.pieces[number].plane.kind == "units":
            return (..., slice(first, last))
        if self.shares(number):
            return (...,)
        return slice(top, bottom), slice(left, right)

    def shares(self, number: int) -> bool:
        """Whether all machines have the weights of layer `number`."""
        return type(self.pieces[number].layer) is keras.layers.Conv2D

    def _build_layer(self, number: int, piece: LayerPiece) -> keras.Layer:
        """Return a copy of the whole layer with only this machine's positions or units."""
        shape, config = extent(self.read[number - 1]), piece.layer.get_config()
        units = piece.plane.kind == "units"
        if units:
            config["units"] = extent(self.held[number])[2]
        local_layer = type(piece.layer).from_config(config)
        local_layer.build((None, prod(shape)) if units else (None, *shape))
        return local_layer


def planes_of(pieces: list[LayerPiece]) -> list[GridLayer]:
    """Return the shapes and windows of the pieces (`GridLayer`), with the loss at the end."""
    planes = [piece.plane for piece in pieces]
    return [*planes, GridLayer("loss", "loss", planes[-1].shape, trains=False)]


def shaped(x: tf.Tensor, rows: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Reshape x to `rows` rows of this shape, and set its static shape."""
    return tf.ensure_shape(tf.reshape(x, (rows, *shape)), (None, *shape))
