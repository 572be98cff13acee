"""One machine's part of a model: its tiles and units, with the initial weights of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.grid.cut import Piece, cut
from labkit.grid.halo import Halo
from labkit.memory import nbytes
from labkit.schedules.grid import Boxes, Grid, Layer, check_fit, crossing, held, read
from labkit.slices import Link
from labkit.stages import footprint

Record = dict[str, Any]
Index = tuple[Any, ...]  # of a whole weight, what belongs to one machine


class Part:
    """What machine `communicator.rank` of a grid computes of a model.

    Unshared kernels and units are cut: a machine has those of its own outputs. Kernels of a
    Conv2D, which all places share, are whole on all machines, and their gradients are summed. The
    whole weights stay in the model, for callbacks and evaluation, until `collect`.

    Args:
        model: Sequential or functional without branches, built.
        communicator: the machines of one replica.
        grid: their rows and columns.
        algorithm: how gradients of shared kernels are summed, see `Communicator.allreduce`.

    Attributes:
        layers: the model as machines see it, the loss at its end.
        variables: those that this machine trains.

    Raises:
        InvalidInput: a layer that cannot be cut, or fewer places or units than machines.
    """

    def __init__(self, model: Any, communicator: Communicator, grid: Grid, algorithm: str) -> None:
        self._model, self._communicator = model, communicator
        pieces = cut(model)
        planes = [piece.plane for piece in pieces]
        self.layers = [*planes, Layer("loss", "loss", planes[-1].shape, trains=False)]
        check_fit(grid, communicator.size, self.layers)
        self._input, self._rest = pieces[0], pieces[1:]
        me = communicator.rank
        self._held = [held(layer, grid)[me] for layer in self.layers]
        self._read = [  # by each layer, of the one before it
            read(layer, before.shape, grid)[me] for before, layer in pairwise(self.layers)
        ]
        crosses, ends = crossing(self.layers, grid), zip(self._held, self._read, strict=False)
        self._halos = [
            Halo(communicator, crosses, number, *boxes) for number, boxes in enumerate(ends, 1)
        ][1:]  # the input is on all machines
        self._own = [self._made(number, piece) for number, piece in enumerate(self._rest, 1)]
        self._links = [Link(communicator, algorithm, number) for number in range(len(self._own))]
        for whole, mine, index in self.pairs():
            mine.assign(whole.numpy()[index])
        self.variables = [v for own in self._own for v in own.trainable_variables]

    def __call__(self, x: Any) -> Any:
        """The outputs of a batch on machine 0; elsewhere as many rows of nothing."""
        rows = tf.shape(x)[0]
        x = tf.cast(tf.convert_to_tensor(x), self._model.compute_dtype)
        x = _shaped(x, rows, self.layers[0].shape)
        for layer in self._input.behind:
            x = layer(x)
        (top, bottom), (left, right), _ = self._read[0].tolist()
        x = x[:, top:bottom, left:right]
        for number, (piece, own) in enumerate(zip(self._rest, self._own, strict=True), 1):
            if number > 1:
                x = self._halos[number - 2](x)
            if piece.plane.kind == "units":
                x = tf.reshape(x, (rows, prod(x.shape[1:])))
            x = self._computed(own, x, self._links[number - 1])
            for layer in piece.behind:
                x = layer(x)
            x = _shaped(x, rows, _extent(self._held[number]))
        x = self._halos[-1](x)
        return _shaped(x, rows, self._model.output_shape[1:]) if self._communicator.rank == 0 else x

    def gradients(self) -> Callable[[Any, Any, Any], Any]:
        """A compiled function of a batch: its loss on machine 0, and this machine's gradients."""
        first = self._communicator.rank == 0

        def objective(x: Any, y: Any, weight: Any) -> Any:
            found = self(x)
            # Elsewhere there is nothing to add up, and its gradient is what machine 0 sends.
            return self._model._compile_loss(y, found, weight) if first else tf.reduce_sum(found)

        @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]
        def gradients(x: Any, y: Any, weight: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = objective(x, y, weight)
            found = tape.gradient(loss, [variable.value for variable in self.variables])
            return loss, [tf.convert_to_tensor(gradient) for gradient in found]

        return gradients  # type: ignore[no-any-return]

    def pairs(self) -> Iterator[tuple[Any, Any, Index]]:
        """Each whole weight, what this machine has of it, and where that is in the whole one."""
        for number, (piece, own) in enumerate(zip(self._rest, self._own, strict=True), 1):
            index = _index(piece, self._held[number])
            for whole, mine in zip(piece.layer.variables, own.variables, strict=True):
                yield whole, mine, index

    def collect(self) -> None:
        """Bring the weights of the whole model up to date, on all machines of the replica."""
        for whole, mine, index in self.pairs():
            found = self._communicator.allgather((index, mine.numpy()), "the weights of the grid")
            value = np.array(whole.numpy())
            for place, weights in found:
                value[place] = weights
            whole.assign(value)

    def describe(self, steps: int = 1) -> list[Record]:
        """A row a layer: what this machine has of it, bytes that it sends before it, of weights.

        Bytes are those of a step: values forward, gradients back, sums of shared kernels apart.

        Args:
            steps: taken so far.
        """
        halos = [None, *self._halos]  # none before the first layer
        rows: list[Record] = []
        for layer, halo in zip(self.layers[1:], halos, strict=True):
            row: Record = {"layer": layer.name, "slices": layer.kind, "why": ""}
            for way in ("forward", "backward"):
                row[f"{way}_bytes"] = halo.payload[way] / steps if halo else 0.0
                row[f"{way}_wire_bytes"] = halo.wire[way] / steps if halo else 0.0
            rows.append(row)
        for row, piece, own, link in zip(rows, self._rest, self._own, self._links, strict=False):
            row["weights_bytes"] = nbytes(own.variables)
            row["whole_weights_bytes"] = nbytes(piece.layer.variables)
            row["kernels_bytes"] = link.payload["backward"] / steps
        rows[-1] |= {"weights_bytes": 0, "whole_weights_bytes": 0, "kernels_bytes": 0.0}
        return rows

    def memory(self, used: Any, plain: Any) -> Record:
        """What this machine keeps of each kind, as of `labkit.memory.by_kind`.

        Activations are not known: patches under kernels are copies that come and go.

        Args:
            used: the optimizer of its variables.
            plain: one of the same settings, new.
        """
        predicted: Record = footprint.weights(self._own)
        predicted["optimizer"] = footprint.optimizer(plain, predicted["gradients"])
        measured = {
            "weights": nbytes(v for own in self._own for v in own.variables),
            "gradients": nbytes(self.variables),
            "optimizer": nbytes(used.variables),
        }
        unknown = {"activations": None, "versions": 0}
        return {
            "stages": [0],
            "whole": nbytes(self._model.variables),
            "measured": measured | unknown,
            "predicted": predicted | unknown,
        }

    def _made(self, number: int, piece: Piece) -> Any:
        """This machine's layer: as the whole one, of its places or units."""
        reads, config = _extent(self._read[number - 1]), piece.layer.get_config()
        units = piece.plane.kind == "units"
        if units:
            config["units"] = _extent(self._held[number])[2]
        made = type(piece.layer).from_config(config)
        made.build((None, prod(reads)) if units else (None, *reads))
        return made

    def _computed(self, own: Any, x: Any, link: Link) -> Any:
        if type(own) is not keras.layers.Conv2D:
            return own(x)
        shared = [link.spread(tf.identity(v.value)) for v in own.trainable_variables]
        y, _ = own.stateless_call(shared, own.non_trainable_variables, x)
        return y


def _index(piece: Piece, box: Boxes) -> Index:
    """Of kernel and bias alike, what a machine that holds this box of the output trains."""
    (top, bottom), (left, right), (first, last) = box.tolist()
    if piece.plane.kind == "units":
        return (..., slice(first, last))
    if type(piece.layer) is keras.layers.Conv2D:
        return (...,)
    return slice(top, bottom), slice(left, right)


def _extent(box: Boxes) -> tuple[int, ...]:
    return tuple((box[:, 1] - box[:, 0]).tolist())


def _shaped(x: Any, rows: Any, shape: tuple[int, ...]) -> Any:
    return tf.ensure_shape(tf.reshape(x, (rows, *shape)), (None, *shape))
