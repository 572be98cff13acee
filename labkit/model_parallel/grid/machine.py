"""The layers of one machine of a grid, and index ranges of the values that it owns and reads."""

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
    """The layers of one machine of a grid: each computes some positions or units of a whole layer.

    Dense layers and layers with unshared kernels are divided: a machine stores only the weights of
    the outputs that it owns. All positions of a Conv2D share one kernel, so every machine stores
    the whole kernel. The machine's layers have variables of their own, separate from those of the
    whole model.

    Args:
        model: Built Sequential or functional model without branches.
        grid: Numbers of rows and columns of machines; every layer must have at least one position
            or unit per machine.
        number: Number of the machine in the grid.

    Attributes:
        number, others: Number of this machine, and count of the other machines in the grid.
        planes: Output shapes and kernel windows of all layers (`GridLayer`), from the input to the
            loss.
        pieces: Layers of the whole model, without its input.
        local_layers: For each layer in `pieces`, a layer with only this machine's positions or
            units.
        held: For each entry of `planes`, the index range of the values that the machine owns.
        read: For each entry of `planes` but the input, the index range of the previous layer's
            outputs that the machine reads.
        borders: For each layer and the loss, the values that the machine exchanges before it
            (`Border`).

    Raises:
        InvalidInput: A layer of the model cannot be divided.
    """

    def __init__(self, model: keras.Model, grid: Grid, number: int) -> None:
        self.number, self.others = number, grid[0] * grid[1] - 1
        self._input, *self.pieces = cut(model)
        self.planes = planes_of([self._input, *self.pieces])
        self.dtype = tf.as_dtype(model.compute_dtype)
        self.held = [owned_boxes(plane, grid)[number] for plane in self.planes]
        self.read = [  # index ranges that each layer reads of the previous layer
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
        """Yield all weights of this machine, each paired with its weight of the whole model."""
        for number in range(len(self.pieces)):
            yield from self.pairs_of(number)

    def pairs_of(self, number: int) -> Iterator[WeightShard]:
        """Yield this machine's weights of layer `number`, paired with those of the whole model."""
        place = self.place(number)
        variables = self.pieces[number].layer.variables, self.local_layers[number].variables
        for whole, local in zip(*variables, strict=True):
            yield WeightShard(whole, local, place)

    def trained_pairs(self, number: int) -> list[WeightShard]:
        """Return trainable weights of layer `number`, paired with those of the whole model."""
        return [pair for pair in self.pairs_of(number) if pair.local.trainable]

    def owned_pairs(self) -> list[WeightShard]:
        """Return trainable weight pairs that this machine owns; machine 0 owns shared kernels."""
        numbers = range(len(self.pieces))
        owned = [n for n in numbers if self.number == 0 or not self.shares(n)]
        return [pair for number in owned for pair in self.trained_pairs(number)]

    @property
    def shares_weights(self) -> bool:
        """Return whether any layer has trainable weights that all machines share."""
        return any(self.shares(n) and self.trained_pairs(n) for n in range(len(self.pieces)))

    def place(self, number: int) -> Place:
        """Return this machine's indices into the whole kernel and bias of layer `number`."""
        (top, bottom), (left, right), (first, last) = self.held[number + 1].tolist()
        if self.pieces[number].plane.kind == "units":
            return (..., slice(first, last))
        if self.shares(number):
            return (...,)
        return slice(top, bottom), slice(left, right)

    def shares(self, number: int) -> bool:
        """Return whether all machines share the weights of layer `number`."""
        return type(self.pieces[number].layer) is keras.layers.Conv2D

    def _build_layer(self, number: int, piece: LayerPiece) -> keras.Layer:
        """Return a copy of a whole layer with only this machine's positions or units."""
        shape, config = extent(self.read[number - 1]), piece.layer.get_config()
        units = piece.plane.kind == "units"
        if units:
            config["units"] = extent(self.held[number])[2]
        local_layer = type(piece.layer).from_config(config)
        local_layer.build((None, prod(shape)) if units else (None, *shape))
        return local_layer


def planes_of(pieces: list[LayerPiece]) -> list[GridLayer]:
    """Return the shapes and windows (`GridLayer`) of all layers, followed by that of the loss."""
    planes = [piece.plane for piece in pieces]
    return [*planes, GridLayer("loss", "loss", planes[-1].shape, trains=False)]


def shaped(x: tf.Tensor, rows: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Reshape x to `rows` samples, each of the given shape, and set the static shape."""
    return tf.ensure_shape(tf.reshape(x, (rows, *shape)), (None, *shape))
