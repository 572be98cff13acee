"""Training by programs: what the two worlds need of a session, and what they leave in it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import carrier
from labkit.network import slower_than_fastest
from labkit.programs import EventLog, Gradient, Parts, Roles, placed
from labkit.programs.actions import Passed, Place, Vector
from labkit.programs.cut_replica import Cut, cut
from labkit.programs.event_log import Row
from labkit.programs.mpi_runtime import MpiRuntime
from labkit.programs.over_grid import tiled
from labkit.programs.replica import Batches, Replica, Shard
from labkit.strategies import ProgramStrategy
from labkit.worker.play_keeper import RankKeeper, VirtualKeeper
from labkit.worker.virtual_play import VirtualPlay

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
    """What a stage needs of a rank's session; see there."""

    experiment: Experiment
    communicator: Communicator
    model: keras.Model
    feed: Feed
    recorder: Recorder | None
    interleaving: list[Event]
    exchanged: dict[str, JSON] | None
    partition: dict[str, JSON]
    keeping: CheckpointContext | None
    checkpoints: dict[str, JSON] | None
    guard: Guard | None
    injectors: dict[int, Injector]

    def compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Compile the model with the experiment's loss and metrics."""

    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer of whoever holds weights, new."""

    def batches(self) -> Batches:
        """Each worker's batches, from the first one on."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out rows (collective)."""


def play(session: ProgramSession, played: ProgramStrategy) -> ComputeBackend:
    """Train by a strategy's programs on the clock that the experiment names.

    The session's model has the trained weights then, and what its layers kept for worker 0; the
    stage knows what was played.
    """
    experiment, communicator = session.experiment, session.communicator
    session.compile(session.optimizer())
    stage = ComputeBackend(session, played)
    numbers = range(len(stage.roles.hosts))
    virtual = experiment.clock == "virtual"
    here = [n for n in numbers if virtual or stage.roles.hosts[n] == communicator.rank]
    stage.hold(here)
    if virtual:
        play_of_all = VirtualPlay(session, played, stage)
        if session.keeping is None or session.recorder is None:
            play_of_all.play()
        else:
            VirtualKeeper(session, session.keeping, session.recorder).play(play_of_all)
        stage.leave()
        return stage
    roles, hosts = stage.roles, stage.roles.hosts
    said = stage.compressor is not None
    routes = roles.routes(said) if played.transport != "two_sided" else {}
    mailbox = carrier(played.transport, communicator, routes, hosts)
    dtype, meanwhile = (
        np.dtype(np.uint8) if said else roles.weights.dtype,
        played.serves_concurrently,
    )
    ranks = MpiRuntime(
        {number: played.program(roles, number) for number in here},
        hosts,
        communicator,
        stage,
        stage.diary,
        dtype,
        meanwhile=meanwhile,
        mailbox=mailbox,
        shapes=stage.replica.shapes,
        seed=experiment.seed,
    )
    if session.keeping is None or session.recorder is None:
        ranks.play()
    else:
        RankKeeper(session, session.keeping, session.recorder).play(ranks, stage, played)
    stage.leave()
    mailbox.close()  # last: what was read of it may still be in the model
    return stage


class ComputeBackend:
    """What one process computes and records of a program: see `labkit.programs.event_log.Backend`.

    Args:
        session: whose model, data and recorder.
        played: the strategy.

    Attributes:
        rows: of the steps of the workers that are played here.
    """

    def __init__(self, session: ProgramSession, played: ProgramStrategy) -> None:
        self._session, workers = session, session.experiment.workers
        if session.feed.steps is None:
            raise InvalidInput(
                "a data set of your own does not say how many batches it has, which programs "
                "count; give steps=…"
            )
        # What replicas say, they say in full, but for means.
        self.compressor = getattr(played, "compressor", None)
        self._copies = played.copies(workers)
        self.replica = Replica(session.model, session.batches())
        self._cut, given = Cut((), (), (), {}), (session.model, session.batches())
        if isinstance(played.replica_cut, tuple):
            self._cut = tiled(*given, played.replica_cut)
        elif played.replica_cut > 1:
            self._cut = cut(*given, played.replica_cut)
            session.partition = self._cut.described
        self.roles = Roles(
            workers,
            list(played.parts(self.replica.shapes)),
            session.feed.steps,
            session.experiment.epochs,
            self.replica.weights,
            list(played.hosts(workers)),
            session.experiment.seed,
            self._cut.parts,
            self._cut.passes,
            slower_than_fastest(session.experiment.slowed, workers),
            _layer_sizes(self.replica.model),
            _first_rate(session.optimizer()),
        )
        writers = [number for worker in range(workers) for number in self.roles.members(worker)]
        self.diary = EventLog(self, session.feed.steps, writers=writers)
        self._virtual = session.experiment.clock == "virtual"
        self.rows: list[Row] = []
        self._shards: dict[int, Shard] = {}
        self._mean: tuple[Vector, Vector] | None = None  # the last one, and the weights after it
        self._holders = len(self._copies) or max(1, len(self.roles.parts))
        self._epochs = Shelf()
        self._ended: dict[int, float] = {}  # s, by epoch
        self._again: Batches | None = None  # from the first one on
        self._last: dict[int, Vector] = {}  # by who holds them

    def hold(self, here: Iterable[int]) -> None:
        """Make what servers hold; without them what each worker has, or all of them together."""
        own = here if self._copies else [0]
        holders = [n for n in here if n in self.roles.servers] if self.roles.parts else own
        for holder in holders:
            self._shards[holder] = self.shard(holder)
            self._last[holder] = self._part(holder).take(self.roles.weights)

    def shard(self, holder: int) -> Shard:
        """Weights of a holder with a new optimizer."""
        return self._sharded(self._part(holder))

    def whole_shard(self) -> Shard:
        """All weights with a new optimizer."""
        return self._sharded(placed(self.replica.shapes, 1, "round_robin")[0])

    def _sharded(self, part: Parts) -> Shard:
        variables = self.replica.model.trainable_variables
        return Shard(part, self.roles.weights, self._session.optimizer(), variables)

    def _part(self, holder: int) -> Parts:
        if self.roles.parts:
            return self.roles.part(holder)
        return placed(self.replica.shapes, 1, "round_robin")[0]

    # --- what the worlds ask for ----------------------------------------------------------------

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Of the worker's next batch."""
        return self._step(worker, lambda: self.replica.gradient(worker, weights))

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Likewise, of a loss that counts soft targets."""
        given = worker, weights, soft, share
        return self._step(worker, lambda: self.replica.distilled(*given))

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """What one predicts for a batch of a worker."""
        return self.replica.predictions(number, worker, step, weights)

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """The curvature of the loss of the worker's first batch along blocks of the weights."""
        return self.replica.curved(worker, weights, ends, self._session.batches())

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        """What a pass of a member gives, of its replica's next batch."""
        return self._cut.members[place.member].forward(place, weights, values)

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        """The gradients of a pass that has gone forward."""
        found = self._cut.members[place.member].backward(place, values)
        return self._looked_at(place.worker, found, place.member) if found.values.size else found

    def _step(self, worker: int, compute: Callable[[], Gradient]) -> Gradient:
        if (injector := self._session.injectors.get(worker)) is not None:
            injector.begins(injector.step + 1)
        return self._looked_at(worker, compute())

    def _looked_at(self, worker: int, found: Gradient, member: int | None = None) -> Gradient:
        """A gradient with what is planted in it, and as the guard lets it on."""
        injector, guard = self._session.injectors.get(worker), self._session.guard
        whole = member is None
        if (injector is None and guard is None) or (whole and not found.rows):
            return found
        replica = self.replica if member is None else self._cut.members[member]
        given, paths = replica.pieces(found.values)[::-1], replica.paths[::-1]
        pieces, skips = given if injector is None else injector.gradients(paths, given), False
        if guard is not None:
            guard.step = found.step
            pieces, skips = guard.look(paths, pieces, worker, found.loss if whole else 0.0)
            if whole and not math.isfinite(found.loss) and not changed(pieces, given):
                guard.note("", 1, worker)
        if skips:
            return replace(found, values=np.zeros_like(found.values), rows=0, loss=0.0)
        return (
            replace(found, values=np.concatenate(pieces[::-1])) if changed(pieces, given) else found
        )

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Apply a gradient; workers that all have the same mean take one step together."""
        if self.roles.parts or self._copies:
            self._last[holder] = self._shards[holder].update(gradient, rate)
            return self._last[holder]
        if self._mean is None or self._mean[0] is not gradient:
            self._mean = gradient, self._shards[0].update(gradient)
            self._last[0] = self._mean[1]
        return self._mean[1]

    def states(self, worker: int) -> Vector:
        """The optimizer's slots and what layers keep, of a worker with weights of its own."""
        kept = [np.asarray(v.value) for v in self._shards[worker].slots]
        kept += [state for state in self.replica.states(worker) if state.dtype.kind == "f"]
        dtype = self.roles.weights.dtype
        return np.concatenate(
            [np.zeros(0, dtype), *(each.reshape(-1) for each in kept)], dtype=dtype
        )

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """Let a worker hold these weights, and states, where there are any."""
        self._shards[worker].become(weights)
        self._last[worker] = weights
        if states is not None:
            self._keep(worker, states)
        return weights

    def forget(self, worker: int) -> None:
        """Let a worker's optimizer begin anew."""
        self._shards[worker].forget(self._session.optimizer())

    def _keep(self, worker: int, flat: Vector) -> None:
        at = 0
        for slot in self._shards[worker].slots:
            size = int(np.prod(slot.shape))
            slot.assign(flat[at : at + size].reshape(slot.shape))
            at += size
        kept = list(self.replica.states(worker))
        for number, each in enumerate(kept):
            if each.dtype.kind == "f":
                kept[number] = flat[at : at + each.size].reshape(each.shape).astype(each.dtype)
                at += each.size
        self.replica.put_states(worker, kept)

    def gradient_anew(self, worker: int, step: int, weights: Vector) -> Vector:
        """Of a batch that a worker has had."""
        if self._again is None:
            self._again = self._session.batches()
        return self.replica.gradient_of(worker, step, weights, self._again).values

    def step(self, row: Row) -> None:
        """A worker's step is over."""
        row = row | {"rank": self.roles.hosts[int(row["rank"])]}
        self.rows.append(row)
        if self._session.recorder is not None:
            self._session.recorder.put(row)

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """An epoch is over for a holder: keep its weights until all ranks have time for them."""
        if self._session.recorder is None or (self._copies and holder not in self._copies):
            return
        held = self._epochs.put(epoch, holder, weights)
        self._ended[epoch] = now  # of the last holder
        if self._virtual and held == self._holders:
            self._evaluate(epoch, self._epochs.take(epoch))

    def stops(self) -> bool:
        """Whether someone wants training to end."""
        return self._session.recorder is not None and self._session.recorder.wanted()

    # --- its state ------------------------------------------------------------------------------

    def keep(self) -> dict[str, Any]:
        """All that it holds."""
        recorder = self._session.recorder
        return {
            "rows": self.rows,
            "last": self._last,
            "mean": self._mean,
            "ended": self._ended,
            "held": self._epochs.look(),
            "shards": {holder: shard.keep() for holder, shard in self._shards.items()},
            "replica": self.replica.keep(),
            "epochs": recorder.epochs if recorder is not None else [],
        }

    def take(self, kept: Mapping[str, Any]) -> None:
        """Go on from what was kept."""
        self.rows, self._last, self._mean = kept["rows"], kept["last"], kept["mean"]
        self._ended = kept["ended"]
        for epoch, parts in kept["held"].items():
            for holder, weights in parts.items():
                self._epochs.put(epoch, holder, weights)
        for holder, values in kept["shards"].items():
            self._shards[holder].take(values)
        steps, states = kept["replica"]
        # Some take far more than their share, but no number may let this read for ever.
        most = 100 * self.roles.steps * self.roles.epochs * self.roles.workers
        if odd := [count for count in steps.values() if not 0 <= count <= most]:
            raise LabkitError(
                f"a state has a worker with {odd[0]} batches; this experiment has {most} at most"
            )
        self.replica.take(steps, states)
        if self._session.recorder is not None:
            self._session.recorder.rows = list(self.rows)
            self._session.recorder.epochs = kept["epochs"]

    # --- the end --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave the weights in the model of every rank, and what was noted (collective)."""
        session = self._session
        session.interleaving = self.diary.events
        own = {n: held for n, held in self._last.items() if n in (self._copies or self._last)}
        last = session.communicator.allgather(own, "the trained weights")
        late = range(0 if self._virtual or session.recorder is None else self.roles.epochs)
        for epoch in late:
            kept = self._epochs.take(epoch), self._ended.get(epoch, 0.0)
            told = session.communicator.allgather(kept, "weights of an epoch")
            parts = _merged(weights for weights, _ in told)
            if len(parts) == self._holders:  # or training was ended before
                self._ended[epoch] = max(now for _, now in told)
                self._evaluate(epoch, parts)
        self._become(_merged(last))

    def _become(self, parts: Mapping[int, Vector]) -> None:
        roles, weights = self.roles, self.roles.whole(parts)
        share, what = self._session.communicator.share, "layers' states"
        if not self._cut.members:
            self.replica.finish(weights, self._kept())
        pairs = zip(self._cut.members, self._cut.parts, strict=True)
        for number, (member, own) in zip(roles.members(0), pairs, strict=False):
            root = 0 if self._virtual else roles.hosts[number]
            member.finish(own.take(weights), share(member.states(0), root, what))

    def _kept(self) -> list[np.ndarray]:
        """What layers keep beside the weights that count: where those are the mean of workers', the
        mean of theirs, too; else worker 0's (collective).
        """
        whose = range(self.roles.workers if len(self._copies) > 1 else 1)
        rank, hosts = self._session.communicator.rank, self.roles.hosts
        here = {n: self.replica.states(n) for n in whose if self._virtual or hosts[n] == rank}
        told = self._session.communicator.allgather(here, "layers' states")
        each = _merged(told)
        return [
            np.mean([each[worker][place] for worker in whose], 0) if own.dtype.kind == "f" else own
            for place, own in enumerate(each[0])
        ]

    def _evaluate(self, epoch: int, parts: Mapping[int, Vector]) -> None:
        """What the weights at the end of an epoch are worth (collective)."""
        session = self._session
        assert session.recorder is not None  # for the type checker: nobody keeps epochs without
        self._become(parts)
        found = {f"val_{name}": value for name, value in session.evaluate().items()}
        rows = [
            row
            for each in session.communicator.allgather(self.rows, "rows of an epoch")
            for row in each
        ]
        steps = (epoch + 1) * self.roles.steps
        told = {"epoch": epoch, "step": steps, "seconds": self._ended[epoch]}
        if len(self._copies) > 1:
            told["consensus_distance"] = self.roles.consensus_distance(parts)
        session.recorder.put_epoch(told | {"loss": _loss(rows, epoch)} | found)


def changed(ours: Sequence[Vector], theirs: Sequence[Vector]) -> bool:
    """Whether some of these are other arrays."""
    return any(one is not other for one, other in zip(ours, theirs, strict=True))


def _loss(rows: Iterable[Row], epoch: int) -> float:
    """The mean loss of an epoch's gradients, at the weights that each was of."""
    own = [row for row in rows if row["epoch"] == epoch]
    samples = sum(row["samples"] for row in own)
    # Who has no samples, as a stage that is not the last one, does not know the loss.
    return sum(row["loss"] * row["samples"] for row in own if row["samples"]) / max(samples, 1)


def _merged(told: Iterable[Mapping[int, _T]]) -> dict[int, _T]:
    return {holder: weights for each in told for holder, weights in each.items()}


def _layer_sizes(model: keras.Model) -> list[int]:
    """How many trainable weights each layer has, in the order of the flat weights."""
    layers = groupby(model.trainable_variables, lambda v: v.path.rpartition("/")[0])
    return [sum(int(np.prod(variable.shape)) for variable in own) for _, own in layers]


def _first_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate of the first step."""
    return float(optimizer.learning_rate)


class Shelf:
    """Weights at the ends of epochs, on disk until they are asked for."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._places: dict[int, dict[int, int]] = {}

    def put(self, epoch: int, holder: int, weights: Vector) -> int:
        """Keep them; of how many holders there are some by now."""
        self._places.setdefault(epoch, {})[holder] = self._file.seek(0, 2)
        np.save(self._file, weights)
        return len(self._places[epoch])

    def take(self, epoch: int) -> dict[int, Vector]:
        """Weights by holder, which are not kept any longer."""
        return self._read(self._places.pop(epoch, {}))

    def look(self) -> dict[int, dict[int, Vector]]:
        """All that it has, by epoch and holder."""
        return {epoch: self._read(places) for epoch, places in self._places.items()}

    def _read(self, places: Mapping[int, int]) -> dict[int, Vector]:
        found = {}
        for holder, place in places.items():
            self._file.seek(place)
            found[holder] = np.load(self._file)
        return found
