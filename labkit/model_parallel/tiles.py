"""Execution of one model on a grid of machines (one rank each): layers, messages and weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import NamedTuple

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.model_parallel.functional import ELEMENTWISE, is_plain, nodes_of, weight_modification
from labkit.model_parallel.losses import Losses, Weighted
from labkit.model_parallel.messages import Border, Halo, LayerRow, Meter, extent, layer_row
from labkit.model_parallel.stages.footprint import weights
from labkit.model_parallel.tensor import Link
from labkit.model_parallel.weights import Place, Share, WeightShard
from labkit.models.unshared import LocallyConnected2D
from labkit.schedules.grid_layers import (
    Grid,
    GridLayer,
    Shape,
    crossing,
    input_boxes,
    owned_boxes,
    validate_grid,
    window,
)

ALLOWED = (
    "LocallyConnected2D, Conv2D, MaxPooling2D and AveragePooling2D without padding, Flatten, Dense "
    "after Flatten, and elementwise activations; no regularizers, no constraints"
)
_POOLING = (keras.layers.MaxPooling2D, keras.layers.AveragePooling2D)
_ACTIVATIONS = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
)


class LayerPiece(NamedTuple):
    """A layer that a grid of machines divides, with the elementwise Keras layers that follow it.

    Attributes:
        plane: Output shape and kernel window of the layer (`GridLayer`).
        layer: The Keras layer of the whole model.
        behind: Elementwise layers that are applied to the output of `layer`.
    """

    plane: GridLayer
    layer: keras.Layer
    behind: list[keras.Layer]


def cut(model: keras.Model) -> list[LayerPiece]:
    """Return the layers of a model as `LayerPiece` objects, starting with the input.

    Raises:
        InvalidInput: A layer cannot be divided, or the model has branches.
    """
    shape = tuple(model.inputs[0].shape[1:]) if getattr(model, "inputs", None) else (None,)
    if None in shape:
        raise InvalidInput(
            "the model does not define the size of its input; begin the model with keras.Input"
        )
    size: Shape = (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, 1, prod(shape))
    first, *layers = _chain_of_layers(model)
    pieces = [LayerPiece(GridLayer("input", "input", size, trains=False), first, [])]
    flat = len(shape) == 1
    for layer in layers:
        if isinstance(layer, keras.layers.Flatten):
            flat = True
        elif _is_elementwise(layer):
            pieces[-1].behind.append(layer)
        else:
            pieces.append(LayerPiece(_plane(layer, pieces[-1].plane.shape, flat), layer, []))
    return pieces


def _plane(layer: keras.Layer, before: Shape, flat: bool) -> GridLayer:
    trains = bool(layer.trainable_variables)
    if _is_divisible(layer):
        if type(layer) is keras.layers.Dense and flat:
            return GridLayer(layer.name, "units", (1, 1, layer.units), trains=trains)
        sizes = None if flat else _window_of(layer)
        if sizes is not None:
            channels = getattr(layer, "filters", before[2])
            return window(layer.name, before, channels, *sizes, trains)
    why = f": {reason}" if (reason := weight_modification(layer)) else ""
    raise InvalidInput(
        f"layer {layer.name!r} ({type(layer).__name__}) cannot be divided over a grid of machines"
        f"{why}; allowed: {ALLOWED}"
    )


def _window_of(layer: keras.Layer) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return a layer's kernel size and strides, or None if it has no window or uses padding."""
    if type(layer) is LocallyConnected2D:
        return layer.kernel_size, layer.strides
    if getattr(layer, "padding", "") != "valid" or layer.data_format != "channels_last":
        return None
    if type(layer) is keras.layers.Conv2D and layer.groups == 1 and layer.dilation_rate == (1, 1):
        return layer.kernel_size, layer.strides
    return (layer.pool_size, layer.strides) if type(layer) in _POOLING else None


def _chain_of_layers(model: keras.Model) -> list[keras.Layer]:
    """Return a model's layers in order; raise an error if the layers do not form a chain."""
    graph = model._functional if isinstance(model, keras.Sequential) else model
    nodes = nodes_of(graph) if hasattr(graph, "_nodes_by_depth") else []
    operations = [node.operation for node in nodes]
    distinct = len({id(operation) for operation in operations}) == len(operations)
    # The variable `row` is true if the model has no branches.
    row = nodes and len(graph._nodes_by_depth) == len(nodes)
    if not row or not distinct or any(len(node.arguments.keras_tensors) > 1 for node in nodes):
        raise InvalidInput(
            "a grid of machines needs a chain of layers, each called once; give a "
            "keras.Sequential that starts with keras.Input, or a functional keras.Model without "
            "branches"
        )
    return operations


def _is_elementwise(layer: keras.Layer) -> bool:
    return type(layer) in _ACTIVATIONS and _is_divisible(layer)


def _is_divisible(layer: keras.Layer) -> bool:
    """Return whether a layer's activation is elementwise and its weights can be divided."""
    activation = getattr(layer, "activation", None)
    by_element = activation is None or activation.__name__ in ELEMENTWISE
    return by_element and is_plain(layer) and not weight_modification(layer)


class GridMachine:
    """The layers of one machine of a grid: each computes some positions or units of a whole layer.

    Dense layers and layers with unshared kernels are divided. In a divided layer, a machine stores
    only the weights of its own outputs. All positions of a Conv2D share one kernel, so every
    machine stores the whole kernel. The machine's layers have variables of their own, separate from
    those of the whole model.

    Args:
        model: Built Sequential or functional model without branches.
        grid: Numbers of rows and columns of machines. Every layer must have at least one position
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
        read: For each layer, the index range that the machine reads. The index range refers to the
            outputs of the previous layer. The input in `planes` has no entry in `read`.
        borders: For each layer and for the loss, an object of class `Border`. A `Border` describes
            the values that machines exchange before a computation.

    Raises:
        InvalidInput: A layer of the model cannot be divided.
    """

    def __init__(self, model: keras.Model, grid: Grid, number: int) -> None:
        self.number, self.others = number, grid[0] * grid[1] - 1
        self._input, *self.pieces = cut(model)
        self.planes = planes_of([self._input, *self.pieces])
        self.dtype = tf.as_dtype(model.compute_dtype)
        self.held = [owned_boxes(plane, grid)[number] for plane in self.planes]
        # For each layer, the list `read` contains index ranges of the previous layer's outputs. The
        # layer reads only the outputs in its index ranges.
        self.read = [
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
        """Return a batch's input, which all machines have, as (batch, rows, columns, channels)."""
        rows, x = tf.shape(x)[0], tf.cast(tf.convert_to_tensor(x), self.dtype)
        x = shaped(x, rows, self.planes[0].shape)
        for layer in self._input.behind:
            x = layer(x)
        return x

    def pairs(self) -> Iterator[WeightShard]:
        """Yield this machine's weights, each paired with the weight of the whole model."""
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
    """Return the shape and window (`GridLayer`) of each layer, and finally of the loss."""
    planes = [piece.plane for piece in pieces]
    return [*planes, GridLayer("loss", "loss", planes[-1].shape, trains=False)]


def shaped(x: tf.Tensor, rows: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Reshape x to `rows` samples, each of the given shape, and set the static shape."""
    return tf.ensure_shape(tf.reshape(x, (rows, *shape)), (None, *shape))


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
        halos: One `Halo` exchange before each layer except the first, and one before the loss.
        links: For each layer, the `Link` that sums its gradients over the machines.
        inputs, outputs, variables, trainable_variables, losses: Same attributes as those of a Keras
            model.

    Raises:
        InvalidInput: A layer cannot be divided, or the grid has too many machines. Each machine
            needs at least one output position or unit of every layer.
    """

    def __init__(
        self, model: keras.Model, communicator: Communicator, grid: Grid, algorithm: str
    ) -> None:
        validate_grid(grid, communicator.size, planes_of(cut(model)))
        super().__init__(model, grid, communicator.rank)
        self.inputs, self.outputs = model.inputs, model.outputs
        # The list `losses` stays empty, because layers that add losses cannot be divided.
        self.losses: list[tf.Tensor] = []
        self._scores = model.output_shape[1:] if communicator.rank == 0 else None
        self.halos = [
            Halo(communicator, border, number) for number, border in enumerate(self.borders, 1)
        ][1:]  # The first layer needs no halo exchange, because every machine has the whole input.
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
        r"""Return the predicted bytes of activations that the backward pass reads, per batch row.

        A batch row has \(|x| + \sum_l (|r_l| + |h_l|)\) stored values. The index l in the sum runs
        over the layers. In the sum over layers, x is the input. Before layer l, the machine reads
        the values \(r_l\). The machine owns the outputs \(h_l\) of layer l. A layer with a separate
        kernel per position also stores its unfolded input windows.
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
    # All machines use the same convolution kernel. The gradient of the operation `spread` therefore
    # sums the gradients of all machines.
    shared = [link.spread(tf.identity(v.value)) for v in layer.trainable_variables]
    y, _ = layer.stateless_call(shared, layer.non_trainable_variables, x)
    return y


class GridPart(Share):
    """The part of a model that machine `communicator.rank` trains, together with the whole model.

    Machine 0 computes the outputs of the whole model.

    Args:
        model, communicator, grid, algorithm: Same arguments as those of `Tiles`.

    Attributes:
        model: Callable that computes this machine's part of the model (`Tiles`).
    """

    model: Tiles

    def __init__(
        self, model: keras.Model, communicator: Communicator, grid: Grid, algorithm: str
    ) -> None:
        super().__init__(communicator)
        self._whole = model
        self.model = Tiles(model, communicator, grid, algorithm)
        for pair in self.pairs():
            pair.copy_from_whole()

    def predict(self, x: tf.Tensor) -> tf.Tensor:
        """Return the whole model's outputs for x on machine 0, and an empty tensor elsewhere."""
        return self.model(x)

    def objective(
        self,
        x: tf.Tensor,
        y: tf.Tensor,
        weight: Weighted,
        losses: Losses,
    ) -> tf.Tensor:
        """Return the loss of a batch on machine 0, and 0 on the other machines.

        Args:
            x, y, weight: Inputs, targets, and the (sample weights, counts) pair that `losses`
                expects.
            losses: `Losses` object that computes the loss to minimize.
        """
        outputs = self.model(x)
        if self.first:
            return losses(y, outputs, weight)
        # Machines other than machine 0 have empty outputs, whose sum is 0. The gradient of the
        # outputs comes from machine 0.
        return tf.reduce_sum(outputs)

    def meters(self) -> list[Meter]:
        """Return the byte counters of this machine's halo exchanges and gradient sums."""
        return [*self.model.halos, *self.model.links]

    def pairs(self) -> Iterator[WeightShard]:
        """Yield each weight of this machine together with the whole model's weight."""
        return self.model.pairs()

    def describe(self, steps: int = 1) -> list[LayerRow]:
        """Return one row per layer, with the bytes of this machine's weights and messages.

        Message bytes are means per training step. Forward values, backward gradients and gradient
        sums of shared kernels have separate byte counts.

        Args:
            steps: Number of training steps since the start, by which the byte counters are divided.
        """
        tiles = self.model
        # All machines have the whole input, so the first layer needs no halo exchange.
        layers = zip(tiles.planes[1:], [None, *tiles.halos], strict=True)
        rows = [layer_row(plane.name, plane.kind, "", halo, steps) for plane, halo in layers]
        for row, piece, layer, link in zip(
            rows, tiles.pieces, tiles.local_layers, tiles.links, strict=False
        ):
            row["weights_bytes"] = weights([layer])["weights"]
            row["whole_weights_bytes"] = weights([piece.layer])["weights"]
            row["kernels_bytes"] = link.payload["backward"] / steps
        rows[-1]["kernels_bytes"] = 0.0  # The last row describes the loss, which has no weights.
        return rows


__all__ = ["GridMachine", "GridPart", "cut", "extent", "planes_of"]
