"""A replica whose model is cut: stages that go forward and back, at weights that are handed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import Nest
from labkit.model_parallel.stages import Blocks, Stage, by_parameters
from labkit.model_parallel.stages.stage import plain
from labkit.programs.actions import Gradient, Passed, Place, Vector
from labkit.programs.passes import Pass, staged
from labkit.programs.placement import Parts, placed
from labkit.programs.replica import Batches, Replica, Triple


class _Gone(NamedTuple):
    """A batch that has gone forward: its number, its rows, its loss, the output's shape."""

    step: int
    rows: int
    loss: float
    shape: tuple[int, ...]


class Member(Protocol):
    """What computes a member of all replicas, each of which has one batch under way at a time."""

    @property
    def paths(self) -> list[str]:
        """Of its variables, one by one."""

    def pieces(self, flat: Vector) -> list[Vector]:
        """Flat weights, or their gradient, one by one."""

    def forward(self, place: Place, weights: Vector, values: Sequence[Vector]) -> Passed:
        """A pass forward, at these weights of the member's."""

    def backward(self, place: Place, values: Sequence[Vector]) -> Gradient:
        """The same pass back."""

    def states(self, worker: int) -> list[np.ndarray]:
        """What layers keep for a worker beside the weights."""

    def finish(self, weights: Vector, states: Sequence[np.ndarray]) -> None:
        """Leave these weights in the whole model, and what its layers kept."""


class Cut(NamedTuple):
    """Replicas of a model that is cut.

    Attributes:
        members: what computes each.
        parts: what each has of the flat weights.
        passes: what each computes, and whom it exchanges messages with in between.
        described: where a chain was cut.
    """

    members: Sequence[Member]
    parts: Sequence[Parts]
    passes: Sequence[Sequence[Pass]]
    described: dict[str, JSON]


class CutReplica(Replica):
    """A stage of all replicas; each has one batch under way at a time.

    Args:
        model: the stage, which shares the layers of the whole model.
        batches: what replicas compute on.
        variables: its weights, in the order of the whole model.
        read: of the first stage, what it takes of a batch; None elsewhere.
        loss: of the last stage, of (y, predictions, sample weights); None elsewhere.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: Batches,
        variables: Sequence[keras.Variable],
        read: Callable[[Nest], list[tf.Tensor]] | None,
        loss: Callable[..., tf.Tensor] | None,
    ) -> None:
        super().__init__(model, batches, variables)
        self._read, self._loss = read, loss
        self._stage = Stage(model, loss, first=read is not None)
        places = {id(variable): place for place, variable in enumerate(self._stage.variables)}
        self._order = [places[id(variable)] for variable in self._variables]
        self._gone: dict[int, _Gone] = {}

    def forward(self, place: Place, weights: Vector, values: Sequence[Vector]) -> Passed:
        """What the stage passes on of a replica's next batch, at these weights."""
        worker = place.worker
        number = self._steps.get(worker, 0)
        self._steps[worker] = number + 1
        x, y, weight = self._batch(worker, number, values)
        rows, last = len(x[0]), self._loss is not None
        if not rows:
            self._gone[worker] = _Gone(number, 0, 0.0, ())
            return Passed(() if last else (weights[:0],), number)
        self._become(worker)
        self._put(weights)
        targets = None if self._loss is None else (y, weight)
        found = np.asarray(self._stage.forward(worker, plain(x), 1.0, targets))
        if self._stage.own_loss is not None:
            raise InvalidInput(
                f"layers of {[layer.name for layer in self.model.layers]} add to the loss, which "
                "the last stage alone knows; leave their regularizers out, or give stages=1"
            )
        loss = float(found) if last else 0.0
        self._gone[worker] = _Gone(number, rows, loss, found.shape)
        return Passed(() if last else (found.reshape(-1),), number)

    def backward(self, place: Place, values: Sequence[Vector]) -> Gradient:
        """The gradient of the batch that has gone forward; rows and loss are the last one's."""
        step, rows, loss, shape = self._gone.pop(place.worker)
        last = self._loss is not None
        told = (rows, loss, step) if last else (0, np.nan, step)
        if not rows:
            nothing = np.zeros(self.size, self._variables[0].dtype)
            return Gradient(nothing, *told, before=() if self._read else (nothing[:0],))
        seed = None if last else tf.constant(values[0].reshape(shape))
        dx = self._stage.backward(place.worker, seed)
        gradients = self._stage.take_gradients()
        flat = np.concatenate([gradients[place].numpy().reshape(-1) for place in self._order])
        before = () if self._read else (np.asarray(dx).reshape(-1),)
        return Gradient(flat, *told, before=before)

    def _batch(
        self, worker: int, number: int, given: Sequence[Vector]
    ) -> tuple[list[tf.Tensor], tf.Tensor | None, tf.Tensor | None]:
        """Inputs, and at the last stage targets and weights of samples."""
        x, y, weight = None, None, None
        if self._read is not None or self._loss is not None:
            x, y, weight = self._batches(worker, number)
        if self._read is not None:
            return self._read(x), y, weight
        return [tf.constant(given[0].reshape(-1, *self.model.inputs[0].shape[1:]))], y, weight


def cut(model: keras.Model, batches: Batches, stages: int) -> Cut:
    """The replicas of a model in stages.

    Raises:
        InvalidInput: the model is no chain of so many stages with weights and one tensor between.
    """
    blocks = Blocks(model)
    if stages > len(blocks):
        raise InvalidInput(
            f"stages={stages} have a block at least, but the model is a chain of {len(blocks)}; "
            f"allowed: 1 to {len(blocks)}"
        )
    counts = [part.count_params() for part in blocks.split(range(len(blocks) + 1)).models]
    edges = by_parameters(counts, stages)
    chain = blocks.split(edges)
    weights = model.trainable_variables
    (all_of_it,) = placed([tuple(weight.shape) for weight in weights], 1, "round_robin")
    pairs = list(zip(weights, all_of_it.pieces, strict=True))
    drawn = once(batches)
    first = [number for _, number in chain.takes[0]]

    def read(x: Nest) -> list[tf.Tensor]:
        inputs = chain.read(x)
        return [inputs[number] for number in first]

    found, parts = [], []
    for stage, part in enumerate(chain.models):
        own = {id(variable) for variable in part.trainable_variables}
        kept = [pair for pair in pairs if id(pair[0]) in own]
        _refuse(part, stage, stages, bool(kept), str(weights[0].dtype))
        found.append(
            CutReplica(
                part,
                drawn,
                [variable for variable, _ in kept],
                read if stage == 0 else None,
                model._compile_loss if stage == stages - 1 else None,
            )
        )
        parts.append(Parts(tuple(piece for _, piece in kept)))
    return Cut(found, parts, staged(parts), blocks.described(edges))


def _refuse(part: keras.Model, stage: int, stages: int, weights: bool, dtype: str) -> None:
    """Refuse a stage that cannot be played."""
    if not weights:
        raise InvalidInput(
            f"stages={stages} leave stage {stage} ({part.layers[-1].name}) without weights to "
            "train; give fewer"
        )
    if stage == 0:
        return
    given = part.inputs
    if len(given) > 1:
        raise InvalidInput(
            f"{len(given)} tensors pass into stage {stage}, a mask among them; one can: give "
            "stages=1, or lk.Pipeline"
        )
    if given[0].dtype != dtype or None in given[0].shape[1:]:
        raise InvalidInput(
            f"what passes into stage {stage} is {given[0].dtype} of shape {given[0].shape}, the "
            f"weights are {dtype}; both must be of one type, and all sizes but the rows known: "
            "give stages=1, or precision='float32'"
        )


def once(batches: Batches) -> Batches:
    """Each worker's latest batch, which several members of its replica ask for."""
    latest: dict[int, tuple[int, Triple]] = {}

    def batch(worker: int, number: int) -> Triple:
        if latest.get(worker, (-1, None))[0] != number:
            latest[worker] = number, batches(worker, number)
        return latest[worker][1]

    return batch
