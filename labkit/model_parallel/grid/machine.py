"""One machine's tiles and units of a model: its layers, and what these hold and read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import keras
import tensorflow as tf

from labkit.model_parallel.grid.border import Border, extent
from labkit.model_parallel.grid.pieces import Piece, cut
from labkit.model_parallel.weights import Pair, Place
from labkit.schedules.grid import Grid, Layer, crossing, held, read


class Machine:
    """What a machine of a grid has of a model.

    Unshared kernels and units are cut: a machine has those of its own outputs. Kernels of a
    Conv2D, which all places share, are whole on all machines. Weights are new.

    Args:
        model: Sequential or functional without branches, built.
        grid: rows and columns of machines, none of which is without a place or unit of a layer.
        number: of the machine.

    Attributes:
        number, others: its own, and how many others there are.
        planes: the model as machines see it, the loss at its end.
        pieces, own: the layers of the whole model behind its input, and this machine's of each.
        held: of each plane, what the machine holds; read: of each but the input, what it reads.
        borders: what it sends and receives before each layer, the loss included.

    Raises:
        InvalidInput: a layer that cannot be cut.
    """

    def __init__(self, model: keras.Model, grid: Grid, number: int) -> None:
        self.number, self.others = number, grid[0] * grid[1] - 1
        self._input, *self.pieces = cut(model)
        self.planes = planes_of([self._input, *self.pieces])
        self.dtype = tf.as_dtype(model.compute_dtype)
        self.held = [held(plane, grid)[number] for plane in self.planes]
        self.read = [  # by each layer, of the one before it
            read(plane, before.shape, grid)[number] for before, plane in pairwise(self.planes)
        ]
        crosses, ends = crossing(self.planes, grid), zip(self.held, self.read, strict=False)
        self.borders = [
            Border(number, crosses, layer, *boxes) for layer, boxes in enumerate(ends, 1)
        ]
        self.own = [self._made(layer, piece) for layer, piece in enumerate(self.pieces, 1)]

    def taken(self, x: tf.Tensor) -> tf.Tensor:
        """The input of a batch, (batch, rows, columns, channels), which is on all machines."""
        rows, x = tf.shape(x)[0], tf.cast(tf.convert_to_tensor(x), self.dtype)
        x = shaped(x, rows, self.planes[0].shape)
        for layer in self._input.behind:
            x = layer(x)
        return x

    def pairs(self) -> Iterator[Pair]:
        """The weights of all layers, beside the whole ones."""
        for number in range(len(self.pieces)):
            yield from self.pairs_of(number)

    def pairs_of(self, number: int) -> Iterator[Pair]:
        """Those of the layer of this number."""
        place = self.place(number)
        variables = self.pieces[number].layer.variables, self.own[number].variables
        for whole, mine in zip(*variables, strict=True):
            yield Pair(whole, mine, place)

    def trained(self, number: int) -> list[Pair]:
        """Those of them that are trained."""
        return [pair for pair in self.pairs_of(number) if pair.own.trainable]

    def kept(self) -> list[Pair]:
        """All that are trained and its own: kernels that all have are those of machine 0."""
        numbers = range(len(self.pieces))
        own = [n for n in numbers if self.number == 0 or not self.shares(n)]
        return [pair for number in own for pair in self.trained(number)]

    @property
    def hands(self) -> bool:
        """Whether weights that are trained are those of all machines."""
        return any(self.shares(n) and self.trained(n) for n in range(len(self.pieces)))

    def place(self, number: int) -> Place:
        """Of kernel and bias of the layer of this number alike, what this machine has."""
        (top, bottom), (left, right), (first, last) = self.held[number + 1].tolist()
        if self.pieces[number].plane.kind == "units":
            return (..., slice(first, last))
        if self.shares(number):
            return (...,)
        return slice(top, bottom), slice(left, right)

    def shares(self, number: int) -> bool:
        """Whether all machines have the weights of the layer of this number."""
        return type(self.pieces[number].layer) is keras.layers.Conv2D

    def _made(self, number: int, piece: Piece) -> keras.Layer:
        """This machine's layer: as the whole one, of its places or units."""
        reads, config = extent(self.read[number - 1]), piece.layer.get_config()
        units = piece.plane.kind == "units"
        if units:
            config["units"] = extent(self.held[number])[2]
        made = type(piece.layer).from_config(config)
        made.build((None, prod(reads)) if units else (None, *reads))
        return made


def planes_of(pieces: list[Piece]) -> list[Layer]:
    """A model as machines see it, the loss at its end."""
    planes = [piece.plane for piece in pieces]
    return [*planes, Layer("loss", "loss", planes[-1].shape, trains=False)]


def shaped(x: tf.Tensor, rows: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """So many rows of this shape, which is known from here on."""
    return tf.ensure_shape(tf.reshape(x, (rows, *shape)), (None, *shape))
