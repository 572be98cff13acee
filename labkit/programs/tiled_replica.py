"""A replica over a grid of machines: what one of them computes, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan, prod

import keras
import numpy as np
import tensorflow as tf

from labkit.model_parallel.grid import Machine, extent
from labkit.model_parallel.meter import Batch
from labkit.model_parallel.stages import Stage
from labkit.model_parallel.stages.stage import Loss, Targets
from labkit.programs.actions import Gradient, Passed, Place, Vector
from labkit.programs.replica import Batches
from labkit.schedules.grid import first_trained


@dataclass
class _UnderWay:
    """A replica's batch that goes through a machine.

    Attributes:
        step: how many there were before.
        rows: of it.
        targets: what the loss is of.
        weights: all that the machine computes with.
        x: what it holds of the latest layer; on the way back, the gradient of what that has read.
        loss: once it is known.
        gradients: of the weights, by layer, the last one first.
    """

    step: int
    rows: int
    targets: Targets
    weights: Vector
    x: Batch
    loss: float = 0.0
    gradients: list[Vector] = field(default_factory=list)


class TiledReplica:
    """A machine of all replicas; each has one batch under way at a time.

    Its first pass is that of the input, which is on all machines: there the last member hands
    kernels that all have to the others, and adds up their gradients on the way back. The next ones
    are those of layers, and the last one that of the loss, which the last member has.

    Args:
        machine: its layers, and what crosses.
        batches: what replicas compute on.
        whole: the model, compiled.
    """

    def __init__(self, machine: Machine, batches: Batches, whole: keras.Model) -> None:
        self._machine, self._batches, self._last = machine, batches, machine.number == 0
        for pair in machine.pairs():
            pair.take()
        self._first = first_trained(machine.planes)
        numbers = range(len(machine.pieces))
        self._layers = [_layer(machine, number, number < self._first) for number in numbers]
        self._end = _end(machine, whole) if self._last else None
        sizes = [layer.size for layer in self._layers]
        self._bounds = np.cumsum([0, *sizes]).tolist()
        # Of all that this machine computes with, what the last member hands out.
        self._handed = np.repeat([machine.shares(number) for number in numbers], sizes)
        self._steps: dict[int, int] = {}
        self._under_way: dict[int, _UnderWay] = {}

    @property
    def paths(self) -> list[str]:
        """Of the layers, whose weights are in one piece each."""
        return [f"{piece.plane.name}/weights" for piece in self._machine.pieces]

    def pieces(self, flat: Vector) -> list[Vector]:
        """Flat weights, layer by layer."""
        return [flat[start:stop] for start, stop in pairwise(self._bounds)]

    def forward(self, place: Place, weights: Vector, values: Sequence[Vector]) -> Passed:
        """What others read of a layer, which reads what this machine holds and is given."""
        worker, turn = place.worker, place.turn
        if turn == 0:
            return self._begun(worker, weights, values)
        under, border = self._under_way[worker], self._machine.borders[turn - 1]
        x = border.inside(under.x)
        for (_, there), given in zip(border.come, values, strict=True):
            x[there] = given.reshape(x[there].shape)
        if turn > len(self._layers):
            under.x = x
            if self._end is not None:
                under.loss = float(self._end.forward(worker, x, weights[:0], under.targets))
            return Passed((), under.step)
        own = under.weights[self._bounds[turn - 1] : self._bounds[turn]]
        under.x = self._layers[turn - 1].forward(worker, x, own)
        read = self._machine.borders[turn].out
        return Passed(tuple(under.x[mine].reshape(-1) for _, mine in read), under.step)

    def _begun(self, worker: int, weights: Vector, values: Sequence[Vector]) -> Passed:
        """A batch is read, and all weights are where they are used."""
        step = self._steps.get(worker, 0)
        self._steps[worker] = step + 1
        x, y, weight = self._batches(worker, step)
        if not self._last:
            own, weights = weights, np.empty(self._bounds[-1], weights.dtype)
            weights[~self._handed] = own
            weights[self._handed] = values[0] if values else own[:0]
        held = np.asarray(self._machine.taken(keras.tree.flatten(x)[0]))
        self._under_way[worker] = _UnderWay(step, len(held), (y, weight), weights, held)
        others = self._machine.others if self._last and self._machine.hands else 0
        return Passed((weights[self._handed],) * others, step)

    def backward(self, place: Place, values: Sequence[Vector]) -> Gradient:
        """The gradients of what was given to a layer; with the input those of all weights."""
        worker, turn = place.worker, place.turn
        if turn == 0:
            return self._ended(worker, values)
        under = self._under_way[worker]
        if turn <= len(self._layers):
            border = self._machine.borders[turn]
            seed = border.back(under.x)
            for (_, mine), given in zip(border.out, values, strict=True):
                seed[mine] += given.reshape(seed[mine].shape)
            under.x, found = self._layers[turn - 1].backward(worker, seed)
            under.gradients.append(found)
        elif self._end is not None:
            under.x, _ = self._end.backward(worker, under.x)  # the loss begins by itself
        read = self._machine.borders[turn - 1].come if turn > self._first else ()
        before = tuple(under.x[there].reshape(-1) for _, there in read)
        return Gradient(under.weights[:0], 0, nan, under.step, before=before)

    def _ended(self, worker: int, values: Sequence[Vector]) -> Gradient:
        """The gradients of the machine's own weights; rows and loss are the last member's."""
        under = self._under_way.pop(worker)
        found = np.concatenate([under.weights[:0], *under.gradients[::-1]])
        if not self._last:
            before = (found[self._handed],) if self._machine.hands else ()
            return Gradient(found[~self._handed], 0, nan, under.step, before=before)
        for given in values:
            found[self._handed] += given
        return Gradient(found, under.rows, under.loss, under.step)

    def states(self, worker: int) -> list[np.ndarray]:
        """What layers keep beside the weights: none that can be cut keeps anything."""
        return []

    def finish(self, weights: Vector, states: Sequence[np.ndarray]) -> None:
        """Leave these weights in the whole model."""
        at = 0
        for whole, own, place in self._machine.kept():
            value, size = whole.numpy(), prod(own.shape)
            value[place] = weights[at : at + size].reshape(own.shape)
            whole.assign(value)
            at += size


class _Layer:
    """What a machine has of a layer, or the loss.

    Args:
        model: of what it reads, (batch, rows, columns, channels), to what it holds.
        loss: of the last one.
        first: nobody asks for the gradient of what it reads.
    """

    def __init__(self, model: keras.Model, loss: Loss | None = None, first: bool = False) -> None:
        self._model, self._stage = model, Stage(model, loss, first=first)
        self.size = sum(prod(variable.shape) for variable in self._stage.variables)

    def forward(
        self, worker: int, x: Batch, weights: Vector, targets: Targets | None = None
    ) -> Batch:
        """What it holds, or the loss."""
        at = 0
        for variable in self._stage.variables:
            size = prod(variable.shape)
            variable.assign(weights[at : at + size].reshape(variable.shape))
            at += size
        if not len(x):
            return np.zeros(() if targets else (0, *self._model.output_shape[1:]), x.dtype)
        return np.asarray(self._stage.forward(worker, tf.constant(x), 1.0, targets))

    def backward(self, worker: int, gradient: Batch) -> tuple[Batch, Vector]:
        """The gradients of what it has read, and of its weights, flat.

        Args:
            worker: whose batch.
            gradient: of what it holds; of the loss nobody has one, and only its rows count.
        """
        if not len(gradient):
            nothing = np.zeros((0, *self._model.input_shape[1:]), gradient.dtype)
            return nothing, np.zeros(self.size, gradient.dtype)
        dx = self._stage.backward(worker, tf.constant(gradient))
        found = [each.numpy().reshape(-1) for each in self._stage.take_gradients()]
        read = gradient[:, :0] if dx is None else np.asarray(dx)  # of the first, nobody asks for it
        return read, np.concatenate([np.empty(0, gradient.dtype), *found])


def _layer(machine: Machine, number: int, first: bool) -> _Layer:
    reads, holds = extent(machine.read[number]), extent(machine.held[number + 1])
    flat = [keras.layers.Flatten()] if machine.pieces[number].plane.kind == "units" else []
    end = [*machine.pieces[number].behind, keras.layers.Reshape(holds)]
    given = keras.Input(reads, dtype=machine.dtype.name)
    return _Layer(keras.Sequential([given, *flat, machine.own[number], *end]), first=first)


def _end(machine: Machine, whole: keras.Model) -> _Layer:
    given = keras.Input(extent(machine.read[-1]), dtype=machine.dtype.name)
    scores = keras.layers.Reshape(whole.output_shape[1:])
    return _Layer(keras.Sequential([given, scores]), whole._compile_loss)
