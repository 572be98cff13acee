"""One machine's tiles and units of a model, and what it needs of others to compute them."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.grid.halo import Halo, extent
from labkit.model_parallel.grid.pieces import Piece, cut
from labkit.model_parallel.tensor import Link
from labkit.model_parallel.weights import Place
from labkit.models.unshared import LocallyConnected2D
from labkit.schedules.grid import Grid, Layer, check_fit, crossing, held, read


class Tiles:
    """What machine `communicator.rank` of a grid computes of a model; called as the model is.

    Unshared kernels and units are cut: a machine has those of its own outputs. Kernels of a
    Conv2D, which all places share, are whole on all machines, and their gradients are summed.
    Weights are new.

    Args:
        model: Sequential or functional without branches, built.
        communicator: the machines of one replica.
        grid: their rows and columns.
        algorithm: how gradients of shared kernels are summed, see `Communicator.allreduce`.

    Attributes:
        planes: the model as machines see it, the loss at its end.
        pieces, own: the layers of the whole model behind its input, and this machine's of each.
        halos: what crosses before each layer behind the first, the loss included.
        links: over which gradients of each layer are summed.
        inputs, outputs, variables, trainable_variables, losses: as of a Keras model.

    Raises:
        InvalidInput: a layer that cannot be cut, or fewer places or units than machines.
    """

    def __init__(
        self, model: keras.Model, communicator: Communicator, grid: Grid, algorithm: str
    ) -> None:
        self._input, *self.pieces = cut(model)
        planes = [self._input.plane, *(piece.plane for piece in self.pieces)]
        self.planes = [*planes, Layer("loss", "loss", planes[-1].shape, trains=False)]
        check_fit(grid, communicator.size, self.planes)
        self.inputs, self.outputs = model.inputs, model.outputs
        self.losses: list[tf.Tensor] = []  # what has any cannot be cut
        self._dtype, me = tf.as_dtype(model.compute_dtype), communicator.rank
        self._scores = model.output_shape[1:] if me == 0 else None
        self._held = [held(plane, grid)[me] for plane in self.planes]
        self._read = [  # by each layer, of the one before it
            read(plane, before.shape, grid)[me] for before, plane in pairwise(self.planes)
        ]
        crosses, ends = crossing(self.planes, grid), zip(self._held, self._read, strict=False)
        self.halos = [
            Halo(communicator, crosses, number, *boxes) for number, boxes in enumerate(ends, 1)
        ][1:]  # the input is on all machines
        self.own = [self._made(number, piece) for number, piece in enumerate(self.pieces, 1)]
        self.links = [Link(communicator, algorithm, number) for number in range(len(self.own))]
        self.variables = [v for own in self.own for v in own.variables]
        self.trainable_variables = [v for own in self.own for v in own.trainable_variables]

    def __call__(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        """The outputs of a batch on machine 0; elsewhere as many rows of nothing.

        Layers that can be cut do the same in training.
        """
        rows = tf.shape(x)[0]
        x = _shaped(tf.cast(tf.convert_to_tensor(x), self._dtype), rows, self.planes[0].shape)
        for layer in self._input.behind:
            x = layer(x)
        (top, bottom), (left, right), _ = self._read[0].tolist()
        x = x[:, top:bottom, left:right]
        for number, (piece, own) in enumerate(zip(self.pieces, self.own, strict=True), 1):
            if number > 1:
                x = self.halos[number - 2](x)
            if piece.plane.kind == "units":
                x = tf.reshape(x, (rows, prod(x.shape[1:])))
            x = _computed(own, x, self.links[number - 1])
            for layer in piece.behind:
                x = layer(x)
            x = _shaped(x, rows, extent(self._held[number]))
        x = self.halos[-1](x)
        return x if self._scores is None else _shaped(x, rows, self._scores)

    def place(self, number: int) -> Place:
        """Of kernel and bias of the layer of this number alike, what this machine has."""
        piece, box = self.pieces[number], self._held[number + 1]
        (top, bottom), (left, right), (first, last) = box.tolist()
        if piece.plane.kind == "units":
            return (..., slice(first, last))
        if type(piece.layer) is keras.layers.Conv2D:
            return (...,)
        return slice(top, bottom), slice(left, right)

    def a_row(self) -> int:
        r"""Bytes of activations that a row is predicted to leave until the backward pass.

        \(|x| + \sum_l (|r_l| + |h_l|)\): the input; what the machine reads before each layer, under
        unshared kernels once more for each of them; and what it holds of the output.
        """
        values = prod(self.planes[0].shape) * (1 + len(self._input.behind))
        for number, piece in enumerate(self.pieces, 1):
            outputs = prod(extent(self._held[number]))
            values += self._under(number) + outputs * (1 + len(piece.behind))
        return (values + prod(extent(self._held[-1]))) * int(self._dtype.size)

    def _under(self, number: int) -> int:
        """Values that a layer keeps of what it reads; of the input only what is a copy of it."""
        piece, box = self.pieces[number - 1], extent(self._read[number - 1])
        unshared = type(piece.layer) is LocallyConnected2D
        same = number == 1 and (unshared or box == self.planes[0].shape)
        values = 0 if same else prod(box)
        if unshared:
            rows, columns, _ = extent(self._held[number])
            values += rows * columns * prod(piece.plane.kernel) * box[2]
        return values

    def _made(self, number: int, piece: Piece) -> keras.Layer:
        """This machine's layer: as the whole one, of its places or units."""
        reads, config = extent(self._read[number - 1]), piece.layer.get_config()
        units = piece.plane.kind == "units"
        if units:
            config["units"] = extent(self._held[number])[2]
        made = type(piece.layer).from_config(config)
        made.build((None, prod(reads)) if units else (None, *reads))
        return made


def _computed(own: keras.Layer, x: tf.Tensor, link: Link) -> tf.Tensor:
    if type(own) is not keras.layers.Conv2D:
        return own(x)
    # All machines have the kernel, each sees other places: the gradient of `spread` adds theirs up.
    shared = [link.spread(tf.identity(v.value)) for v in own.trainable_variables]
    y, _ = own.stateless_call(shared, own.non_trainable_variables, x)
    return y


def _shaped(x: tf.Tensor, rows: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    return tf.ensure_shape(tf.reshape(x, (rows, *shape)), (None, *shape))
