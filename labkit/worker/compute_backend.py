"""The compute backend of programs: the gradients, updates and records of workers and servers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.network import relative_compute_times
from labkit.programs import EventLog, Gradient, Roles, ServerPieces, placed
from labkit.programs.actions import Passed, Place, Vector
from labkit.programs.cut_replica import CutReplicas, cut
from labkit.programs.event_log import Row
from labkit.programs.over_grid import tiled
from labkit.programs.replica import Batches, Replica, Shard
from labkit.strategies import ProgramStrategy

if TYPE_CHECKING:
    import keras

    from labkit.common.canonical_json import JSON
    from labkit.communicator import Communicator, Injector
    from labkit.exchange import Guard
    from labkit.experiment import Experiment
    from labkit.programs.event_log import Event
    from labkit.records.checkpoints import CheckpointContext
    from labkit.worker.feed import Feed
    from labkit.worker.recorder import Recorder


_T = TypeVar("_T")


class ProgramSession(Protocol):
    """The part of `TrainingSession` that the compute backend uses."""

    experiment: Experiment
    communicator: Communicator
    model: keras.Model
    feed: Feed
    recorder: Recorder | None
    interleaving: list[Event]
    exchanged: dict[str, JSON] | None
    partition: dict[str, JSON]
    checkpoint_context: CheckpointContext | None
    checkpoints: dict[str, JSON] | None
    guard: Guard | None
    injectors: dict[int, Injector]

    def compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Compile the model with the experiment's loss and metrics."""

    def optimizer(self) -> keras.optimizers.Optimizer:
        """Return a new optimizer for one server or worker that holds weights."""

    def batches(self) -> Batches:
        """Return a function (worker, batch number) that returns a training batch of this worker."""

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the validation rows (collective)."""


class ComputeBackend:
    """Computes and records the steps of programs, see `labkit.programs.event_log.Backend`.

    Args:
        session: Session that provides the model, the data and the recorder.
        strategy: Strategy that runs as one program per worker and per server.

    Attributes:
        rows: Rows of the run's history, one for each training step of each worker in this process.
    """

    def __init__(self, session: ProgramSession, strategy: ProgramStrategy) -> None:
        self._session, workers = session, session.experiment.workers
        if session.feed.steps is None:
            raise InvalidInput(
                "the number of batches of your dataset is unknown, but this strategy needs it; "
                "give steps_per_epoch=…"
            )
        # Replicas compress only the values that they average; all other values are sent
        # uncompressed.
        self.compressor = getattr(strategy, "compressor", None)
        self._copies = strategy.copies(workers)
        self.replica = Replica(session.model, session.batches())
        self._cut, model_and_batches = (
            CutReplicas((), (), (), {}),
            (session.model, session.batches()),
        )
        if isinstance(strategy.replica_cut, tuple):
            self._cut = tiled(*model_and_batches, strategy.replica_cut)
        elif strategy.replica_cut > 1:
            self._cut = cut(*model_and_batches, strategy.replica_cut)
            session.partition = self._cut.described
        self.roles = Roles(
            workers,
            list(strategy.parts(self.replica.shapes)),
            session.feed.steps,
            session.experiment.epochs,
            self.replica.weights,
            list(strategy.hosts(workers)),
            session.experiment.seed,
            self._cut.parts,
            self._cut.passes,
            relative_compute_times(session.experiment.slowdowns, workers),
            _layer_sizes(self.replica.model),
            _first_rate(session.optimizer()),
        )
        writers = [number for worker in range(workers) for number in self.roles.members(worker)]
        self.diary = EventLog(self, session.feed.steps, writers=writers)
        self._virtual = session.experiment.clock == "virtual"
        self.rows: list[Row] = []
        self._shards: dict[int, Shard] = {}
        # The attribute `_mean` holds the last mean gradient and the weights after its update.
        self._mean: tuple[Vector, Vector] | None = None
        self._holders = len(self._copies) or max(1, len(self.roles.parts))
        self._epochs = EpochWeightStore()
        # The dict `_ended` holds the end time of each epoch in s.
        self._ended: dict[int, float] = {}
        # A replay reads a second copy of the batches, which starts from batch 0.
        self._replay_batches: Batches | None = None
        # The dict `_last` holds the current weights of each server or worker.
        self._last: dict[int, Vector] = {}

    def hold(self, local_numbers: Iterable[int]) -> None:
        """Create the weights of local servers; without servers, of each worker that holds
        weights.
        """
        holders_without_servers = local_numbers if self._copies else [0]
        holders = (
            [n for n in local_numbers if n in self.roles.servers]
            if self.roles.parts
            else holders_without_servers
        )
        for holder in holders:
            self._shards[holder] = self.shard(holder)
            self._last[holder] = self._part(holder).take(self.roles.weights)

    def shard(self, holder: int) -> Shard:
        """Return the weights of a server or worker that holds weights, with a new optimizer."""
        return self._make_shard(self._part(holder))

    def whole_shard(self) -> Shard:
        """Return all weights of the model as one shard, with a new optimizer."""
        return self._make_shard(placed(self.replica.shapes, 1, "round_robin")[0])

    def _make_shard(self, part: ServerPieces) -> Shard:
        variables = self.replica.model.trainable_variables
        return Shard(part, self.roles.weights, self._session.optimizer(), variables)

    def _part(self, holder: int) -> ServerPieces:
        if self.roles.parts:
            return self.roles.part(holder)
        return placed(self.replica.shapes, 1, "round_robin")[0]

    # --- calls of the runtimes ------------------------------------------------------------------

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Return the gradient of the worker's next batch."""
        return self._step(worker, lambda: self.replica.gradient(worker, weights))

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Return the gradient of the worker's next batch, for a loss that includes soft labels."""
        arguments = worker, weights, soft, share
        return self._step(worker, lambda: self.replica.distilled(*arguments))

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """Return the predictions of replica `number` for one batch of `worker`."""
        return self.replica.predictions(number, worker, step, weights)

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """Return the loss curvature along blocks of weights, at the first batch of the worker."""
        return self.replica.curved(worker, weights, ends, self._session.batches())

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        """Run the forward pass of one stage or machine of a replica on the replica's next batch."""
        return self._cut.members[place.member].forward(place, weights, values)

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        """Return the gradients of one stage or machine of a replica after its forward pass."""
        gradient = self._cut.members[place.member].backward(place, values)
        return (
            self._inject_and_guard(place.worker, gradient, place.member)
            if gradient.values.size
            else gradient
        )

    def _step(self, worker: int, compute: Callable[[], Gradient]) -> Gradient:
        if (injector := self._session.injectors.get(worker)) is not None:
            injector.begin_step(injector.step + 1)
        return self._inject_and_guard(worker, compute())

    def _inject_and_guard(
        self, worker: int, gradient: Gradient, member: int | None = None
    ) -> Gradient:
        """Inject faults into a gradient, check it for NaN and infinity, and return the result."""
        injector, guard = self._session.injectors.get(worker), self._session.guard
        whole = member is None
        if (injector is None and guard is None) or (whole and not gradient.rows):
            return gradient
        replica = self.replica if member is None else self._cut.members[member]
        originals, paths = replica.pieces(gradient.values)[::-1], replica.paths[::-1]
        pieces, skips = (
            originals if injector is None else injector.gradients(paths, originals),
            False,
        )
        if guard is not None:
            guard.step = gradient.step
            pieces, skips = guard.check_gradients(
                paths, pieces, worker, gradient.loss if whole else 0.0
            )
            if whole and not math.isfinite(gradient.loss) and not changed(pieces, originals):
                guard.record("", 1, worker)
        if skips:
            return replace(gradient, values=np.zeros_like(gradient.values), rows=0, loss=0.0)
        return (
            replace(gradient, values=np.concatenate(pieces[::-1]))
            if changed(pieces, originals)
            else gradient
        )

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Apply a gradient and return the new weights; apply a gradient of shared weights once."""
        if self.roles.parts or self._copies:
            self._last[holder] = self._shards[holder].update(gradient, rate)
            return self._last[holder]
        if self._mean is None or self._mean[0] is not gradient:
            self._mean = gradient, self._shards[0].update(gradient)
            self._last[0] = self._mean[1]
        return self._mean[1]

    def states(self, worker: int) -> Vector:
        """Return a worker's optimizer slots and layer states as one flat array."""
        states = [np.asarray(v.value) for v in self._shards[worker].slots]
        states += [state for state in self.replica.states(worker) if state.dtype.kind == "f"]
        dtype = self.roles.weights.dtype
        return np.concatenate(
            [np.zeros(0, dtype), *(state.reshape(-1) for state in states)], dtype=dtype
        )

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """Set a worker's weights; if `states` is given, also set optimizer and layer states."""
        self._shards[worker].become(weights)
        self._last[worker] = weights
        if states is not None:
            self._set_states(worker, states)
        return weights

    def forget(self, worker: int) -> None:
        """Replace a worker's optimizer by a new one, whose slots have no values."""
        self._shards[worker].forget(self._session.optimizer())

    def _set_states(self, worker: int, flat: Vector) -> None:
        at = 0
        for slot in self._shards[worker].slots:
            size = int(np.prod(slot.shape))
            slot.assign(flat[at : at + size].reshape(slot.shape))
            at += size
        states = list(self.replica.states(worker))
        for number, state in enumerate(states):
            if state.dtype.kind == "f":
                states[number] = flat[at : at + state.size].reshape(state.shape).astype(state.dtype)
                at += state.size
        self.replica.put_states(worker, states)

    def recompute_gradient(self, worker: int, step: int, weights: Vector) -> Vector:
        """Return the gradient of an earlier batch of a worker, at the given weights."""
        if self._replay_batches is None:
            self._replay_batches = self._session.batches()
        return self.replica.gradient_of(worker, step, weights, self._replay_batches).values

    def step(self, row: Row) -> None:
        """Record that a worker has completed a training step."""
        row = row | {"rank": self.roles.hosts[int(row["rank"])]}
        self.rows.append(row)
        if self._session.recorder is not None:
            self._session.recorder.put(row)

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """Store the weights of a server or worker at the end of an epoch, until validation."""
        if self._session.recorder is None or (self._copies and holder not in self._copies):
            return
        count = self._epochs.store(epoch, holder, weights)
        # The server or worker that ends an epoch last determines the epoch's end time.
        self._ended[epoch] = now
        if self._virtual and count == self._holders:
            self._evaluate(epoch, self._epochs.pop(epoch))

    def stops(self) -> bool:
        """Return whether a user has asked to stop."""
        return self._session.recorder is not None and self._session.recorder.is_stop_requested()

    # --- checkpoints ----------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the complete state of this backend for a checkpoint."""
        recorder = self._session.recorder
        return {
            "rows": self.rows,
            "last": self._last,
            "mean": self._mean,
            "ended": self._ended,
            "held": self._epochs.load_all(),
            "shards": {holder: shard.keep() for holder, shard in self._shards.items()},
            "replica": self.replica.keep(),
            "epochs": recorder.epochs if recorder is not None else [],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of this backend from a checkpoint."""
        self.rows, self._last, self._mean = state["rows"], state["last"], state["mean"]
        self._ended = state["ended"]
        for epoch, parts in state["held"].items():
            for holder, weights in parts.items():
                self._epochs.store(epoch, holder, weights)
        for holder, values in state["shards"].items():
            self._shards[holder].take(values)
        steps, states = state["replica"]
        # A fast worker may train on many more batches than its equal share. The limit on a worker's
        # batches is therefore high. The limit on a worker's batches bounds the time that loading a
        # damaged checkpoint can take.
        most = 100 * self.roles.steps * self.roles.epochs * self.roles.workers
        if odd := [count for count in steps.values() if not 0 <= count <= most]:
            raise LabkitError(
                f"the checkpoint has a worker with {odd[0]} batches, but the experiment "
                f"allows {most}"
            )
        self.replica.take(steps, states)
        if self._session.recorder is not None:
            self._session.recorder.rows = list(self.rows)
            self._session.recorder.epochs = state["epochs"]

    # --- results --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Copy the trained weights to all ranks and the log to the session (collective)."""
        session = self._session
        session.interleaving = self.diary.events
        local_weights = {
            n: weights for n, weights in self._last.items() if n in (self._copies or self._last)
        }
        last = session.communicator.allgather(local_weights, "the trained weights")
        remaining_epochs = range(
            0 if self._virtual or session.recorder is None else self.roles.epochs
        )
        for epoch in remaining_epochs:
            local = self._epochs.pop(epoch), self._ended.get(epoch, 0.0)
            gathered = session.communicator.allgather(local, "the weights of an epoch")
            parts = _merged(weights for weights, _ in gathered)
            # Training may have ended during the epoch.
            if len(parts) == self._holders:
                self._ended[epoch] = max(now for _, now in gathered)
                self._evaluate(epoch, parts)
        self._set_model(_merged(last))

    def _set_model(self, parts: Mapping[int, Vector]) -> None:
        roles, weights = self.roles, self.roles.assemble_weights(parts)
        share, what = self._session.communicator.broadcast_object, "layers' states"
        if not self._cut.members:
            self.replica.finish(weights, self._final_states())
        pairs = zip(self._cut.members, self._cut.parts, strict=True)
        for number, (member, part) in zip(roles.members(0), pairs, strict=False):
            root = 0 if self._virtual else roles.hosts[number]
            member.finish(part.take(weights), share(member.states(0), root, what))

    def _final_states(self) -> list[np.ndarray]:
        """Return the layer states (such as moving statistics) for the final weights (collective).

        If the final weights are the mean over all workers, the layer states are the mean, too. If
        the final weights are not a mean, the layer states are those of worker 0.
        """
        workers = range(self.roles.workers if len(self._copies) > 1 else 1)
        rank, hosts = self._session.communicator.rank, self.roles.hosts
        local_states = {
            n: self.replica.states(n) for n in workers if self._virtual or hosts[n] == rank
        }
        gathered = self._session.communicator.allgather(local_states, "layers' states")
        states = _merged(gathered)
        return [
            np.mean([states[worker][place] for worker in workers], 0)
            if state.dtype.kind == "f"
            else state
            for place, state in enumerate(states[0])
        ]

    def _evaluate(self, epoch: int, parts: Mapping[int, Vector]) -> None:
        """Validate the weights of all servers or workers after an epoch (collective)."""
        session = self._session
        # The assertion tells the type checker that epochs need a recorder.
        assert session.recorder is not None
        self._set_model(parts)
        metrics = {f"val_{name}": value for name, value in session.evaluate().items()}
        rows = [
            row
            for rank_rows in session.communicator.allgather(self.rows, "the rows of an epoch")
            for row in rank_rows
        ]
        steps = (epoch + 1) * self.roles.steps
        record = {"epoch": epoch, "step": steps, "seconds": self._ended[epoch]}
        if len(self._copies) > 1:
            record["consensus_distance"] = self.roles.consensus_distance(parts)
        session.recorder.put_epoch(record | {"loss": _loss(rows, epoch)} | metrics)


def changed(arrays: Sequence[Vector], originals: Sequence[Vector]) -> bool:
    """Return whether any array is not the same object as its original."""
    return any(one is not other for one, other in zip(arrays, originals, strict=True))


def _loss(rows: Iterable[Row], epoch: int) -> float:
    """Return the mean training loss of an epoch, weighted by the samples of each step."""
    rows_of_epoch = [row for row in rows if row["epoch"] == epoch]
    samples = sum(row["samples"] for row in rows_of_epoch)
    # Ranks without samples, such as all pipeline stages but the last, do not know the loss.
    return sum(row["loss"] * row["samples"] for row in rows_of_epoch if row["samples"]) / max(
        samples, 1
    )


def _merged(mappings: Iterable[Mapping[int, _T]]) -> dict[int, _T]:
    return {holder: weights for mapping in mappings for holder, weights in mapping.items()}


def _layer_sizes(model: keras.Model) -> list[int]:
    """Return the number of trainable weights in each layer, in the order of the flat weights."""
    layers = groupby(model.trainable_variables, lambda v: v.path.rpartition("/")[0])
    return [sum(int(np.prod(variable.shape)) for variable in variables) for _, variables in layers]


def _first_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Return the learning rate that an optimizer uses in its first step."""
    return float(optimizer.learning_rate)


class EpochWeightStore:
    """A temporary file that stores the weights from the end of each epoch until validation."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[int, dict[int, int]] = {}

    def store(self, epoch: int, holder: int, weights: Vector) -> int:
        """Store the weights of a server or worker; return the number of entries for the epoch."""
        self._places.setdefault(epoch, {})[holder] = self._file.seek(0, 2)
        np.save(self._file, weights)
        return len(self._places[epoch])

    def pop(self, epoch: int) -> dict[int, Vector]:
        """Remove and return the weights of an epoch, with one entry per server or worker."""
        return self._read(self._places.pop(epoch, {}))

    def load_all(self) -> dict[int, dict[int, Vector]]:
        """Return all stored weights; each epoch has one entry per server or worker."""
        return {epoch: self._read(places) for epoch, places in self._places.items()}

    def _read(self, places: Mapping[int, int]) -> dict[int, Vector]:
        weights = {}
        for holder, place in places.items():
            self._file.seek(place)
            weights[holder] = np.load(self._file)
        return weights
