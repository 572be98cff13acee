"""Replicas of a model on a grid of machines, which store parts of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan, prod

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.model_parallel.messages import Batch
from labkit.model_parallel.stages import Stage
from labkit.model_parallel.stages.stage import Loss, Targets
from labkit.model_parallel.tiles import GridMachine, extent, planes_of
from labkit.model_parallel.tiles import cut as pieces_of
from labkit.programs.actions import Gradient, Passed, Place, Vector
from labkit.programs.cut_replica import CutReplicas, cache_latest_batch
from labkit.programs.replica import Batches
from labkit.programs.roles import Pass, ServerPieces, placed
from labkit.schedules.grid_layers import Grid, first_trained_layer, validate_grid


@dataclass
class _PendingBatch:
    """The batch of a replica that one machine of the grid is processing.

    Attributes:
        step: Number of batches that the replica processed before this batch.
        rows: Number of samples in the batch.
        targets: Targets and sample weights of the loss.
        weights: All weights that the machine uses, including shared kernels, as a flat vector.
        x: In the forward pass, the machine's part of the latest layer's output. In the backward
            pass, `x` is the gradient with respect to the latest layer's input.
        loss: Loss of the batch; 0 until the forward pass is complete.
        gradients: Gradients of the weights: one flat vector per layer, from the last layer to the
            first.
    """

    step: int
    rows: int
    targets: Targets
    weights: Vector
    x: Batch
    loss: float = 0.0
    gradients: list[Vector] = field(default_factory=list)


class TiledReplica:
    """The computation of one machine in a grid of machines.

    The first pass reads the inputs of the batch, which are available on every machine. In the first
    forward pass, machine 0 sends shared kernels to the other machines. Machine 0 is the last member
    of the replica. When the first pass runs backward, machine 0 sums the gradients of the shared
    kernels over all machines. Each later pass except the final pass computes one layer. In the
    final pass, machine 0 computes the loss.

    Args:
        machine: Machine of the grid, with its layers and the values that it exchanges with other
            machines.
        batches: Function of (worker, batch number) that returns a batch.
        whole: The whole model, after `compile`.
    """

    def __init__(self, machine: GridMachine, batches: Batches, whole: keras.Model) -> None:
        self._machine, self._batches, self._last = machine, batches, machine.number == 0
        for pair in machine.pairs():
            pair.copy_from_whole()
        self._first = first_trained_layer(machine.planes)
        numbers = range(len(machine.pieces))
        self._layers = [_layer(machine, number, number < self._first) for number in numbers]
        self._end = _end(machine, whole) if self._last else None
        sizes = [layer.size for layer in self._layers]
        self._bounds = np.cumsum([0, *sizes]).tolist()
        # `_shared_mask` is True for the weights that machine 0 sends to all other machines.
        self._shared_mask = np.repeat([machine.shares(number) for number in numbers], sizes)
        self._steps: dict[int, int] = {}
        self._pending: dict[int, _PendingBatch] = {}

    @property
    def paths(self) -> list[str]:
        """The names of the weights, with one name for all weights of a layer."""
        return [f"{piece.plane.name}/weights" for piece in self._machine.pieces]

    def pieces(self, flat: Vector) -> list[Vector]:
        """Split flat weights into one flat vector per layer."""
        return [flat[start:stop] for start, stop in pairwise(self._bounds)]

    def forward(self, place: Place, weights: Vector, values: Sequence[Vector]) -> Passed:
        """Compute a layer from own and received values; return its outputs for other machines."""
        worker, turn = place.worker, place.turn
        if turn == 0:
            return self._begin_batch(worker, weights, values)
        pending, border = self._pending[worker], self._machine.borders[turn - 1]
        x = border.inside(pending.x)
        for (_, index), received in zip(border.come, values, strict=True):
            x[index] = received.reshape(x[index].shape)
        if turn > len(self._layers):
            pending.x = x
            if self._end is not None:
                pending.loss = float(self._end.forward(worker, x, weights[:0], pending.targets))
            return Passed((), pending.step)
        layer_weights = pending.weights[self._bounds[turn - 1] : self._bounds[turn]]
        pending.x = self._layers[turn - 1].forward(worker, x, layer_weights)
        receivers = self._machine.borders[turn].out
        return Passed(
            tuple(pending.x[output_index].reshape(-1) for _, output_index in receivers),
            pending.step,
        )

    def _begin_batch(self, worker: int, weights: Vector, values: Sequence[Vector]) -> Passed:
        """Read a batch, and combine this machine's own weights with weights from machine 0."""
        step = self._steps.get(worker, 0)
        self._steps[worker] = step + 1
        x, y, weight = self._batches(worker, step)
        if not self._last:
            own_weights, weights = weights, np.empty(self._bounds[-1], weights.dtype)
            weights[~self._shared_mask] = own_weights
            weights[self._shared_mask] = values[0] if values else own_weights[:0]
        inputs = np.asarray(self._machine.prepare_input(keras.tree.flatten(x)[0]))
        self._pending[worker] = _PendingBatch(step, len(inputs), (y, weight), weights, inputs)
        others = self._machine.others if self._last and self._machine.shares_weights else 0
        return Passed((weights[self._shared_mask],) * others, step)

    def backward(self, place: Place, values: Sequence[Vector]) -> Gradient:
        """Return the gradient of a layer's input; for the first pass, of all weights."""
        worker, turn = place.worker, place.turn
        if turn == 0:
            return self._end_batch(worker, values)
        pending = self._pending[worker]
        if turn <= len(self._layers):
            border = self._machine.borders[turn]
            seed = border.back(pending.x)
            for (_, output_index), received in zip(border.out, values, strict=True):
                seed[output_index] += received.reshape(seed[output_index].shape)
            pending.x, gradient = self._layers[turn - 1].backward(worker, seed)
            pending.gradients.append(gradient)
        elif self._end is not None:
            # The argument `pending.x` only determines the number of samples, because the loss needs
            # no incoming gradient.
            pending.x, _ = self._end.backward(worker, pending.x)
        senders = self._machine.borders[turn - 1].come if turn > self._first else ()
        before = tuple(pending.x[input_index].reshape(-1) for _, input_index in senders)
        return Gradient(pending.weights[:0], 0, nan, pending.step, before=before)

    def _end_batch(self, worker: int, values: Sequence[Vector]) -> Gradient:
        """Return this machine's weight gradients; machine 0 adds the sample count and the loss."""
        pending = self._pending.pop(worker)
        gradients = np.concatenate([pending.weights[:0], *pending.gradients[::-1]])
        if not self._last:
            before = (gradients[self._shared_mask],) if self._machine.shares_weights else ()
            return Gradient(gradients[~self._shared_mask], 0, nan, pending.step, before=before)
        for received in values:
            gradients[self._shared_mask] += received
        return Gradient(gradients, pending.rows, pending.loss, pending.step)

    def states(self, worker: int) -> list[np.ndarray]:
        """Return an empty list, because layers on a grid have no state other than weights."""
        return []

    def finish(self, weights: Vector, states: Sequence[np.ndarray]) -> None:
        """Copy the machine's weights into the whole model."""
        at = 0
        for whole, variable, place in self._machine.owned_pairs():
            value, size = whole.numpy(), prod(variable.shape)
            value[place] = weights[at : at + size].reshape(variable.shape)
            whole.assign(value)
            at += size


class _Layer:
    """One machine's part of a layer, or the loss of the whole model.

    Args:
        model: Keras model from the layer's input (batch, rows, columns, channels) to its output.
        loss: Loss function; None if the object computes a layer.
        first: Whether the input needs no gradient, because no earlier layer has trainable weights.
    """

    def __init__(self, model: keras.Model, loss: Loss | None = None, first: bool = False) -> None:
        self._model, self._stage = model, Stage(model, loss, first=first)
        self.size = sum(prod(variable.shape) for variable in self._stage.variables)

    def forward(
        self, worker: int, x: Batch, weights: Vector, targets: Targets | None = None
    ) -> Batch:
        """Compute the layer's output, or the loss."""
        at = 0
        for variable in self._stage.variables:
            size = prod(variable.shape)
            variable.assign(weights[at : at + size].reshape(variable.shape))
            at += size
        if not len(x):
            return np.zeros(() if targets else (0, *self._model.output_shape[1:]), x.dtype)
        return np.asarray(self._stage.forward(worker, tf.constant(x), 1.0, targets))

    def backward(self, worker: int, gradient: Batch) -> tuple[Batch, Vector]:
        """Compute the gradient of the layer's input, and the flat gradient of the layer's weights.

        Args:
            worker: Number of the worker whose batch is pending.
            gradient: Gradient of the layer's output. An object that computes the loss uses only the
                number of rows of `gradient`.
        """
        if not len(gradient):
            empty = np.zeros((0, *self._model.input_shape[1:]), gradient.dtype)
            return empty, np.zeros(self.size, gradient.dtype)
        dx = self._stage.backward(worker, tf.constant(gradient))
        gradients = [
            weight_gradient.numpy().reshape(-1) for weight_gradient in self._stage.take_gradients()
        ]
        # `input_gradient` is empty if the input needs no gradient.
        input_gradient = gradient[:, :0] if dx is None else np.asarray(dx)
        return input_gradient, np.concatenate([np.empty(0, gradient.dtype), *gradients])


def _layer(machine: GridMachine, number: int, first: bool) -> _Layer:
    reads, holds = extent(machine.read[number]), extent(machine.held[number + 1])
    flat = [keras.layers.Flatten()] if machine.pieces[number].plane.kind == "units" else []
    end = [*machine.pieces[number].behind, keras.layers.Reshape(holds)]
    inputs = keras.Input(reads, dtype=machine.dtype.name)
    return _Layer(
        keras.Sequential([inputs, *flat, machine.local_layers[number], *end]), first=first
    )


def _end(machine: GridMachine, whole: keras.Model) -> _Layer:
    inputs = keras.Input(extent(machine.read[-1]), dtype=machine.dtype.name)
    scores = keras.layers.Reshape(whole.output_shape[1:])
    return _Layer(keras.Sequential([inputs, scores]), whole._compile_loss)


def tiled(model: keras.Model, batches: Batches, grid: Grid) -> CutReplicas:
    """Divide a model over a grid of machines; machine 0 (the last member) computes the loss.

    Raises:
        InvalidInput: If a layer cannot be divided, or has fewer output positions or units than
            there are machines.
    """
    validate_grid(grid, None, planes_of(pieces_of(model)))
    dtype = str(model.trainable_variables[0].dtype)
    if model.compute_dtype != dtype:
        raise InvalidInput(
            f"values between machines of grid={grid} are {model.compute_dtype}, the weights "
            f"are {dtype}; both must have one dtype: give precision='float32'"
        )
    first, *others = [GridMachine(model, grid, number) for number in range(grid[0] * grid[1])]
    machines, cached_batches = [*others, first], cache_latest_batch(batches)
    members = [TiledReplica(machine, cached_batches, model) for machine in machines]
    parts = [_part(machine, model) for machine in machines]
    work = sum(_work(machine, n) for machine in machines for n in range(len(machine.pieces)))
    return CutReplicas(members, parts, [_passes(machine, work) for machine in machines], {})


def _part(machine: GridMachine, model: keras.Model) -> ServerPieces:
    """Return the ranges of the flat weights that a machine stores."""
    weights = model.trainable_variables
    (all_of_it,) = placed([tuple(weight.shape) for weight in weights], 1, "round_robin")
    places = {id(pair.whole): pair.place for pair in machine.owned_pairs()}
    tiles = [
        piece.within(places[id(weight)])
        for weight, piece in zip(weights, all_of_it.pieces, strict=True)
        if id(weight) in places
    ]
    return ServerPieces(tuple(piece for tile in tiles for piece in tile))


def _passes(machine: GridMachine, work: int) -> list[Pass]:
    """Return a machine's passes: one for the input, one per layer, and one for the loss."""
    others, first, last = machine.others, first_trained_layer(machine.planes), machine.number == 0

    def members(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple((number - 1) % (others + 1) for number in numbers)

    passes = [
        Pass(
            gets=(others,) if machine.shares_weights and not last else (),
            gives=tuple(range(others)) if machine.shares_weights and last else (),
        )
    ]
    for turn, border in enumerate(machine.borders, 1):
        layer = turn <= len(machine.pieces)
        receivers = machine.borders[turn].out if layer else ()
        passes.append(
            Pass(
                gets=members([machine_number for machine_number, _ in border.come]),
                gives=members([machine_number for machine_number, _ in receivers]),
                share=_work(machine, turn - 1) / work if layer else 0.0,
                goes_back=turn >= first,
                returns=turn > first,
            )
        )
    return passes


def _work(machine: GridMachine, number: int) -> int:
    """Return how many multiplications a machine needs for a layer, per sample."""
    piece = machine.pieces[number]
    reads, holds = extent(machine.read[number]), extent(machine.held[number + 1])
    if piece.plane.kind == "units":
        return prod(holds) * prod(reads)
    return prod(holds) * prod(piece.plane.kernel) * (reads[2] if piece.layer.variables else 1)
