"""The forward pass of one machine of a grid, with messages between its layers."""

from __future__ import annotations

from math import prod

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.grid.border import extent
from labkit.model_parallel.grid.halo import Halo
from labkit.model_parallel.grid.machine import GridMachine, planes_of, shaped
from labkit.model_parallel.grid.pieces import cut
from labkit.model_parallel.tensor import Link
from labkit.models.unshared import LocallyConnected2D
from labkit.schedules.grid import Grid, validate_grid


class Tiles(GridMachine):
    """The layers that machine `communicator.rank` computes, callable like a Keras model.

    Gradients of kernels that all machines share are summed over the machines.

    Args:
        model: Built Sequential or functional model without branches.
        communicator: Communicator of the machines (ranks) of one replica.
        grid: Numbers of rows and columns of machines.
        algorithm: Allreduce algorithm for the gradients of shared kernels, see
            `Communicator.allreduce`.

    Attributes:
        halos: `Halo` exchanges, one before each layer except the first and one before the loss.
        links: For each layer, the `Link` that sums its gradients over the machines.
        inputs, outputs, variables, trainable_variables, losses: Same attributes as those of a Keras
            model.

    Raises:
        InvalidInput: If a layer cannot be divided, or if there are more machines than output
            positions or units of a layer to divide among them.
    """

    def __init__(
        self, model: keras.Model, communicator: Communicator, grid: Grid, algorithm: str
    ) -> None:
        validate_grid(grid, communicator.size, planes_of(cut(model)))
        super().__init__(model, grid, communicator.rank)
        self.inputs, self.outputs = model.inputs, model.outputs
        self.losses: list[tf.Tensor] = []  # empty, because layers that add losses cannot be divided
        self._scores = model.output_shape[1:] if communicator.rank == 0 else None
        self.halos = [
            Halo(communicator, border, number) for number, border in enumerate(self.borders, 1)
        ][1:]  # the first layer reads the input, which every machine has
        self.links = [
            Link(communicator, algorithm, number) for number in range(len(self.local_layers))
        ]
        self.variables = [v for layer in self.local_layers for v in layer.variables]
        self.trainable_variables = [
            v for layer in self.local_layers for v in layer.trainable_variables
        ]

    def __call__(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Return the whole model's outputs on machine 0, and an empty tensor on other machines.

        The argument `training` has no effect, because layers that depend on it cannot be divided.
        """
        rows, x = tf.shape(x)[0], self.prepare_input(x)
        (top, bottom), (left, right), _ = self.read[0].tolist()
        x = x[:, top:bottom, left:right]
        for number, (piece, local_layer) in enumerate(
            zip(self.pieces, self.local_layers, strict=True), 1
        ):
            if number > 1:
                x = self.halos[number - 2](x)
            if piece.plane.kind == "units":
                x = tf.reshape(x, (rows, prod(x.shape[1:])))
            x = _apply_layer(local_layer, x, self.links[number - 1])
            for layer in piece.behind:
                x = layer(x)
            x = shaped(x, rows, extent(self.held[number]))
        x = self.halos[-1](x)
        return x if self._scores is None else shaped(x, rows, self._scores)

    def bytes_per_row(self) -> int:
        r"""Return the predicted bytes of activations per batch row that the backward pass reads.

        The number of stored values per batch row is \(|x| + \sum_l (|r_l| + |h_l|)\), a sum over
        the layers l. In this sum, x is the input, \(r_l\) the values that the machine reads before
        layer l, and \(h_l\) the outputs that it owns. A layer with a separate kernel per position
        also stores its unfolded input windows.
        """
        values = prod(self.planes[0].shape) * (1 + len(self._input.behind))
        for number, piece in enumerate(self.pieces, 1):
            outputs = prod(extent(self.held[number]))
            values += self._stored_inputs(number) + outputs * (1 + len(piece.behind))
        return (values + prod(extent(self.held[-1]))) * int(self.dtype.size)

    def _stored_inputs(self, number: int) -> int:
        """Return how many input values a layer stores in addition to the model's input."""
        piece, box = self.pieces[number - 1], extent(self.read[number - 1])
        unshared = type(piece.layer) is LocallyConnected2D
        same = number == 1 and (unshared or box == self.planes[0].shape)
        values = 0 if same else prod(box)
        if unshared:
            rows, columns, _ = extent(self.held[number])
            values += rows * columns * prod(piece.plane.kernel) * box[2]
        return values


def _apply_layer(layer: keras.Layer, x: tf.Tensor, link: Link) -> tf.Tensor:
    if type(layer) is not keras.layers.Conv2D:
        return layer(x)
    # All machines use the same kernel, so the gradient of the operation `spread` sums the gradients
    # of all machines.
    shared = [link.spread(tf.identity(v.value)) for v in layer.trainable_variables]
    y, _ = layer.stateless_call(shared, layer.non_trainable_variables, x)
    return y
