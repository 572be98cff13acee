"""One machine's tiles and units of a model, computed with what it needs of others."""

from __future__ import annotations

from math import prod

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.grid.border import extent
from labkit.model_parallel.grid.halo import Halo
from labkit.model_parallel.grid.machine import Machine, planes_of, shaped
from labkit.model_parallel.grid.pieces import cut
from labkit.model_parallel.tensor import Link
from labkit.models.unshared import LocallyConnected2D
from labkit.schedules.grid import Grid, check_fit


class Tiles(Machine):
    """What machine `communicator.rank` of a grid computes of a model; called as the model is.

    Gradients of kernels that all machines have are summed.

    Args:
        model: Sequential or functional without branches, built.
        communicator: the machines of one replica.
        grid: their rows and columns.
        algorithm: how gradients of shared kernels are summed, see `Communicator.allreduce`.

    Attributes:
        halos: what crosses before each layer behind the first, the loss included.
        links: over which gradients of each layer are summed.
        inputs, outputs, variables, trainable_variables, losses: as of a Keras model.

    Raises:
        InvalidInput: a layer that cannot be cut, or fewer places or units than machines.
    """

    def __init__(
        self, model: keras.Model, communicator: Communicator, grid: Grid, algorithm: str
    ) -> None:
        check_fit(grid, communicator.size, planes_of(cut(model)))
        super().__init__(model, grid, communicator.rank)
        self.inputs, self.outputs = model.inputs, model.outputs
        self.losses: list[tf.Tensor] = []  # what has any cannot be cut
        self._scores = model.output_shape[1:] if communicator.rank == 0 else None
        self.halos = [
            Halo(communicator, border, number) for number, border in enumerate(self.borders, 1)
        ][1:]  # the input is on all machines
        self.links = [Link(communicator, algorithm, number) for number in range(len(self.own))]
        self.variables = [v for own in self.own for v in own.variables]
        self.trainable_variables = [v for own in self.own for v in own.trainable_variables]

    def __call__(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        """The outputs of a batch on machine 0; elsewhere as many rows of nothing.

        Layers that can be cut do the same in training.
        """
        rows, x = tf.shape(x)[0], self.taken(x)
        (top, bottom), (left, right), _ = self.read[0].tolist()
        x = x[:, top:bottom, left:right]
        for number, (piece, own) in enumerate(zip(self.pieces, self.own, strict=True), 1):
            if number > 1:
                x = self.halos[number - 2](x)
            if piece.plane.kind == "units":
                x = tf.reshape(x, (rows, prod(x.shape[1:])))
            x = _computed(own, x, self.links[number - 1])
            for layer in piece.behind:
                x = layer(x)
            x = shaped(x, rows, extent(self.held[number]))
        x = self.halos[-1](x)
        return x if self._scores is None else shaped(x, rows, self._scores)

    def a_row(self) -> int:
        r"""Bytes of activations that a row is predicted to leave until the backward pass.

        \(|x| + \sum_l (|r_l| + |h_l|)\): the input; what the machine reads before each layer, under
        unshared kernels once more for each of them; and what it holds of the output.
        """
        values = prod(self.planes[0].shape) * (1 + len(self._input.behind))
        for number, piece in enumerate(self.pieces, 1):
            outputs = prod(extent(self.held[number]))
            values += self._under(number) + outputs * (1 + len(piece.behind))
        return (values + prod(extent(self.held[-1]))) * int(self.dtype.size)

    def _under(self, number: int) -> int:
        """Values that a layer keeps of what it reads; of the input only what is a copy of it."""
        piece, box = self.pieces[number - 1], extent(self.read[number - 1])
        unshared = type(piece.layer) is LocallyConnected2D
        same = number == 1 and (unshared or box == self.planes[0].shape)
        values = 0 if same else prod(box)
        if unshared:
            rows, columns, _ = extent(self.held[number])
            values += rows * columns * prod(piece.plane.kernel) * box[2]
        return values


def _computed(own: keras.Layer, x: tf.Tensor, link: Link) -> tf.Tensor:
    if type(own) is not keras.layers.Conv2D:
        return own(x)
    # All machines have the kernel, each sees other places: the gradient of `spread` adds theirs up.
    shared = [link.spread(tf.identity(v.value)) for v in own.trainable_variables]
    y, _ = own.stateless_call(shared, own.non_trainable_variables, x)
    return y
