"""A model-parallel replica whose stages run forward and backward at given weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import Nest
from labkit.model_parallel.stages import Blocks, Stage, balance_parameters
from labkit.model_parallel.stages.stage import unwrap_single
from labkit.programs.actions import Gradient, Passed, Place, Vector
from labkit.programs.replica import Batches, Replica, Triple
from labkit.programs.roles import Pass, ServerPieces, placed, staged


class _PendingBatch(NamedTuple):
    """Data that a stage stores after a forward pass: batch number, samples, loss, output shape."""

    step: int
    rows: int
    loss: float
    shape: tuple[int, ...]


class ReplicaMember(Protocol):
    """Computation of one stage or machine for all replicas, with one pending batch per replica."""

    @property
    def paths(self) -> list[str]:
        """The paths, in the Keras model, of the variables that belong to this replica member."""

    def pieces(self, flat: Vector) -> list[Vector]:
        """Split flat weights, or their gradient, into one flat vector per variable."""

    def forward(self, place: Place, weights: Vector, values: Sequence[Vector]) -> Passed:
        """Run one forward pass of the replica member at given weights."""

    def backward(self, place: Place, values: Sequence[Vector]) -> Gradient:
        """Run one backward pass over the batch for which the replica has run all forward passes."""

    def states(self, worker: int) -> list[np.ndarray]:
        """Return the values of the non-trainable layer variables in a worker's replica."""

    def finish(self, weights: Vector, states: Sequence[np.ndarray]) -> None:
        """Store given weights, and values of non-trainable variables, in the whole model."""


class CutReplicas(NamedTuple):
    """A model divided among the members (stages or machines) of a replica.

    Attributes:
        members: Computation of each replica member.
        parts: For each member, the part of the flat weights that it stores.
        passes: List of the passes of each member. A pass contains the numbers of the members with
            which it exchanges messages.
        described: Description of the cuts between stages, which is stored in the record of the run.
    """

    members: Sequence[ReplicaMember]
    parts: Sequence[ServerPieces]
    passes: Sequence[Sequence[Pass]]
    described: dict[str, JSON]


class CutReplica(Replica):
    """The computation of one stage for all replicas; each replica has at most one pending batch.

    Args:
        model: Model of the stage, which shares its layers with the whole model.
        batches: Function of (worker, batch number) that returns a batch.
        variables: Weights of the stage, in the order of the whole model.
        read: Function that selects inputs of the model; only for the first stage.
        loss: Loss function of (y, predictions, sample weights) for the last stage; None at other
            stages.
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
        self._pending: dict[int, _PendingBatch] = {}

    def forward(self, place: Place, weights: Vector, values: Sequence[Vector]) -> Passed:
        """Compute the stage's output for a replica's next batch at given weights."""
        worker = place.worker
        number = self._steps.get(worker, 0)
        self._steps[worker] = number + 1
        x, y, weight = self._batch(worker, number, values)
        rows, last = len(x[0]), self._loss is not None
        if not rows:
            self._pending[worker] = _PendingBatch(number, 0, 0.0, ())
            return Passed(() if last else (weights[:0],), number)
        self._become(worker)
        self._put(weights)
        targets = None if self._loss is None else (y, weight)
        output = np.asarray(self._stage.forward(worker, unwrap_single(x), 1.0, targets))
        if self._stage.own_loss is not None:
            raise InvalidInput(
                f"layers among {[layer.name for layer in self.model.layers]} add to the loss, but "
                "only the last stage computes the loss; remove their regularizers, or give "
                "stages=1"
            )
        loss = float(output) if last else 0.0
        self._pending[worker] = _PendingBatch(number, rows, loss, output.shape)
        return Passed(() if last else (output.reshape(-1),), number)

    def backward(self, place: Place, values: Sequence[Vector]) -> Gradient:
        """Compute the pending batch's gradient; the last stage adds its sample count and loss."""
        step, rows, loss, shape = self._pending.pop(place.worker)
        last = self._loss is not None
        facts = (rows, loss, step) if last else (0, np.nan, step)
        if not rows:
            nothing = np.zeros(self.size, self._variables[0].dtype)
            return Gradient(nothing, *facts, before=() if self._read else (nothing[:0],))
        seed = None if last else tf.constant(values[0].reshape(shape))
        dx = self._stage.backward(place.worker, seed)
        gradients = self._stage.take_gradients()
        flat = np.concatenate([gradients[place].numpy().reshape(-1) for place in self._order])
        before = () if self._read else (np.asarray(dx).reshape(-1),)
        return Gradient(flat, *facts, before=before)

    def _batch(
        self, worker: int, number: int, values: Sequence[Vector]
    ) -> tuple[list[tf.Tensor], tf.Tensor | None, tf.Tensor | None]:
        """Return a stage's inputs, targets and sample weights; inner stages have only inputs."""
        x, y, weight = None, None, None
        if self._read is not None or self._loss is not None:
            x, y, weight = self._batches(worker, number)
        if self._read is not None:
            return self._read(x), y, weight
        return [tf.constant(values[0].reshape(-1, *self.model.inputs[0].shape[1:]))], y, weight


def cut(model: keras.Model, batches: Batches, stages: int) -> CutReplicas:
    """Divide a model into stages, and return the computation of each stage with its weights.

    Raises:
        InvalidInput: If the model cannot be divided into the requested number of stages. Each stage
            needs trainable weights, and a single tensor from the previous stage.
    """
    blocks = Blocks(model)
    if stages > len(blocks):
        raise InvalidInput(
            f"stages={stages} need a block each, but the model has {len(blocks)} blocks; "
            f"allowed: 1 to {len(blocks)}"
        )
    counts = [part.count_params() for part in blocks.split(range(len(blocks) + 1)).models]
    edges = balance_parameters(counts, stages)
    chain = blocks.split(edges)
    weights = model.trainable_variables
    (all_of_it,) = placed([tuple(weight.shape) for weight in weights], 1, "round_robin")
    pairs = list(zip(weights, all_of_it.pieces, strict=True))
    cached_batches = cache_latest_batch(batches)
    first = [number for _, number in chain.takes[0]]

    def read(x: Nest) -> list[tf.Tensor]:
        inputs = chain.read(x)
        return [inputs[number] for number in first]

    members, parts = [], []
    for stage, part in enumerate(chain.models):
        own_variables = {id(variable) for variable in part.trainable_variables}
        trained = [pair for pair in pairs if id(pair[0]) in own_variables]
        _validate_stage(part, stage, stages, bool(trained), str(weights[0].dtype))
        members.append(
            CutReplica(
                part,
                cached_batches,
                [variable for variable, _ in trained],
                read if stage == 0 else None,
                model._compile_loss if stage == stages - 1 else None,
            )
        )
        parts.append(ServerPieces(tuple(piece for _, piece in trained)))
    return CutReplicas(members, parts, staged(parts), blocks.described(edges))


def _validate_stage(part: keras.Model, stage: int, stages: int, weights: bool, dtype: str) -> None:
    """Raise InvalidInput if a stage has no trainable weights, or if its inputs are unsuitable."""
    if not weights:
        raise InvalidInput(
            f"stages={stages} leave stage {stage} ({part.layers[-1].name}) without weights to "
            "train; give fewer stages"
        )
    if stage == 0:
        return
    inputs = part.inputs
    if len(inputs) > 1:
        raise InvalidInput(
            f"stage {stage} would receive {len(inputs)} tensors, including a mask, but only one is "
            "supported; give stages=1, or use lk.Pipeline"
        )
    if inputs[0].dtype != dtype or None in inputs[0].shape[1:]:
        raise InvalidInput(
            f"the input of stage {stage} is {inputs[0].dtype} of shape {inputs[0].shape}, the "
            f"weights are {dtype}; both need one dtype, and all sizes except rows must be known: "
            "give stages=1, or precision='float32'"
        )


def cache_latest_batch(batches: Batches) -> Batches:
    """Store each worker's latest batch, because several members of a replica request it."""
    latest: dict[int, tuple[int, Triple]] = {}

    def batch(worker: int, number: int) -> Triple:
        if latest.get(worker, (-1, None))[0] != number:
            latest[worker] = number, batches(worker, number)
        return latest[worker][1]

    return batch
