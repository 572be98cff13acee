"""What each rank does with an experiment."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common.canonical_json import JSON
from labkit.communicator import Communicator, RankDied, join
from labkit.experiment import Experiment
from labkit.network.fault import left
from labkit.records.checkpoints import CheckpointContext
from labkit.records.result import Event, RankResult, Verdict, WholeResult
from labkit.records.store import Record
from labkit.records.stream import Writer, sees
from labkit.strategies import Batch, Strategy
from labkit.worker.remote_stream import Afar
from labkit.worker.source_bundle import enter

if TYPE_CHECKING:
    from labkit.exchange import Timeline
    from labkit.model_parallel.memory import Memory
    from labkit.network import Slowdown
    from labkit.worker.peer_memory_recovery import PeerMemoryRecovery
    from labkit.worker.session import TrainingSession

Report: TypeAlias = Callable[[str, list[Record]], None]


def work(
    communicator: Communicator,
    experiment: Experiment,
    keeping: CheckpointContext | None = None,
    report: Report = lambda kind, records: None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> RankResult:
    """Train one seed of an experiment on this rank.

    Args:
        communicator: the ranks that run it.
        experiment: what to run; `ranks` equals the communicator's size.
        keeping: where and how often the state of training is kept, and with which one it begins.
        report: receives what there is to tell while it goes on, see `labkit.records.stream`.
        stop_asked: asked on rank 0; True ends training on all ranks after the same step.
    """
    from labkit.keras import use_one_device
    from labkit.worker.peer_memory_recovery import PeerMemoryRecovery, RestartTraining
    from labkit.worker.session import restore

    use_one_device(communicator)
    goes_on = experiment.strategy.resumable and not experiment.plays
    if experiment.clock == "wall" and experiment.slow:
        communicator.be_slow(_slow_ranks(experiment), experiment.seed)
    communicator.rules.checks = experiment.checksums
    comeback = PeerMemoryRecovery(communicator, report) if communicator.crew is not None else None
    try:
        while True:
            try:
                begun = keeping
                if comeback is not None and comeback.pending:
                    begun = comeback.gather(keeping)
                    gone = comeback.faults[-1]["ranks"]
                    experiment = experiment.replace(faults=left(experiment.faults, gone))
                return _train(communicator, experiment, begun, report, stop_asked, comeback)
            except RestartTraining:
                continue
            except Exception:
                if comeback is None or not comeback.is_possible or not goes_on:
                    raise
                comeback.lose()
    finally:
        restore()


def _slow_ranks(experiment: Experiment) -> dict[int, Slowdown]:
    """Who is slow, by rank: those of the network's links, and all places of slow workers."""
    workers, slow = experiment.workers, experiment.slowed
    found = {rank: law for rank, law in slow.items() if rank >= workers}
    for worker in slow.keys() - found.keys():
        found |= dict.fromkeys(experiment.strategy.places(worker, workers), slow[worker])
    return found


def _train(
    communicator: Communicator,
    experiment: Experiment,
    keeping: CheckpointContext | None,
    report: Report,
    stop_asked: Callable[[], bool],
    comeback: PeerMemoryRecovery | None = None,
) -> RankResult:
    from labkit.communicator.clock import offset
    from labkit.exchange.compression_stats import Microscope
    from labkit.model_parallel import memory
    from labkit.worker import equivalence, step_monitor
    from labkit.worker.feed import read
    from labkit.worker.recorder import Recorder
    from labkit.worker.session import TrainingSession

    def tell(kind: str, **record: str | int | None) -> None:
        if communicator.rank == 0:
            report(kind, [record])

    tell("doing", what="reading data")
    source = read(experiment, communicator)
    tell("doing", what="at the gate")
    verdict = equivalence.verify(experiment, communicator, source)
    tell("doing", what="building the model")
    session = TrainingSession(experiment, communicator, source)
    tell("plan", steps=session.feed.steps)
    recorder = Recorder(communicator, report, stop_asked)
    recorder.timeline = session.timeline
    session.callbacks.insert(0, recorder)
    session.recorder = recorder
    session.comeback = comeback
    if keeping is not None:
        session.keep(keeping)
    every = experiment.strategy.stats_interval
    microscope = Microscope(communicator, every) if every else None
    if microscope is not None:
        session.watchers.append(microscope.look)
    step_monitor.keep(session, recorder)
    memory.reset_peak()
    offsets = [offset(communicator.clock, communicator.allgather)]
    tell("doing", what="training")
    try:
        experiment.strategy.train(session)
    except Exception:
        recorder.say()  # how far this rank had come
        raise
    measure = partial(offset, communicator.clock, communicator.allgather)
    offsets.append(session.outlive(measure))
    tell("doing", what="evaluating")
    if microscope is not None:
        for step, figures in microscope.by_step().items():
            recorder.rows[step - recorder.begin] |= figures
    kept, peak = session.memory or _memory(session), memory.peak()
    session.close()
    evaluation = session.outlive(session.evaluate)
    exchange = session.exchange()  # which saving the model forgets
    whole = session.outlive(partial(_whole, session, verdict, evaluation, exchange, comeback))
    return RankResult(
        rows=recorder.rows,
        memory=kept,
        peak=peak,
        stopped=recorder.stopped,
        timeline=_events(recorder.timeline),
        offsets=offsets if communicator.size > 1 else [],
        microscope=microscope.rows if microscope is not None else [],
        layers=session.layers,
        bad_numbers=session.guard.found if session.guard is not None else [],
        interleaving=session.interleaving,
        whole=whole,
    )


def _whole(
    session: TrainingSession,
    verdict: Verdict,
    evaluation: dict[str, float],
    exchange: dict[str, JSON] | None,
    comeback: PeerMemoryRecovery | None,
) -> WholeResult | None:
    """What the first rank says of all; the others see that nobody has died over it."""
    from labkit.records import environment

    communicator, recovery = session.communicator, session.recovery
    whole = None
    # Where training may outlive a rank, so does what is handed over: two have it.
    if communicator.rank < (1 if recovery is None else 2):
        assert session.recorder is not None
        whole = WholeResult(
            epochs=session.recorder.epochs,
            evaluation=evaluation,
            equivalence=verdict,
            environment=environment.describe(),
            exchange=exchange,
            partition=session.partition or None,
            checkpoints=session.checkpoints,
            faults=[
                *(comeback.faults if comeback is not None else []),
                *(recovery.faults if recovery is not None else []),
            ],
            stretches=recovery.stretches if recovery is not None else [],
            model=session.saved(),  # last: it compiles the model anew
        )
    communicator.meet("the end of training")
    return whole


def prepare() -> None:
    """Import what training needs, and collect what that leaves: the first run would wait for it."""
    from labkit.worker.session import leave_modules

    leave_modules()


def infer(
    communicator: Communicator, file: str | bytes, strategy: Strategy, x: Batch, batch_size: int
) -> Batch | None:
    """This rank's predictions of the rows x by a model; None where it holds none.

    Args:
        communicator: the ranks that predict together.
        file: of the model, as Keras has saved it, or what it holds.
        strategy: how the model is divided among them.
        x: an array (rows, …), or a nest of them, the same on all ranks.
        batch_size: rows that go through the model at a time.
    """
    from labkit.keras import use_one_device
    from labkit.worker import inference
    from labkit.worker.session import restore

    use_one_device(communicator)
    try:
        return inference.predict(communicator, inference.load(file), strategy, x, batch_size)
    finally:
        restore()


def _memory(session: TrainingSession) -> Memory:
    """What a rank keeps that trains the whole model; strategies that cut it say so themselves."""
    from labkit.model_parallel import memory

    experiment, model, workers = session.experiment, session.model, session.communicator.size
    rows = experiment.strategy.rows(experiment.batch_size, workers)
    plain = session.optimizer()
    look = workers == 1 and not experiment.plays  # there, many workers take turns in one process
    return memory.by_kind(model, model, model.optimizer, plain, rows, look=look)


def _events(timeline: Timeline | None) -> list[Event]:
    """What there is to see beside the steps themselves; nothing where ranks exchanged nothing."""
    events = list(timeline.events) if timeline is not None else []
    return events if any(kind != "step" for kind, *_ in events) else []


def main(payload: bytes) -> Any:
    """Entry of an engine: calls a function on the ranks that the task names.

    The task holds `call` (function and arguments, pickled), `ranks`, `spares` (how many of them
    wait for a place), `limit`, `network`, `folder`, `modules`, `luggage` and `environment`; with
    `stream`, a folder, and `submitter`, a process, the function also gets `report` and
    `stop_asked`, see `labkit.records.stream`; `deaths` counts the ranks that were gone before. A
    failure is written on the board first, so that ranks which wait for this one raise too and every
    engine stays alive for the next call. Returns what the function does, the ranks that this one
    has outlived, and its number; None of a spare nobody needed.
    """
    import cloudpickle

    task = cloudpickle.loads(payload)
    os.environ.update(task["environment"])
    if task["spares"]:
        prepare()
    communicator = join(task["ranks"], task["spares"], task["limit"], task["network"])
    if communicator is None:
        return None, [], None
    communicator.deaths = task.get("deaths", 0)
    try:
        enter(task["folder"], task["modules"], task["luggage"])
        function, arguments = cloudpickle.loads(task["call"])
        options: dict[str, Callable[..., bool | None]] = {}
        if "stream" in task:
            stream, submitter = Path(task["stream"]), task["submitter"]
            seen = sees(stream, submitter)
            own = (
                communicator.number
                if communicator.crew is None
                else communicator.crew.member(communicator.number)
            )
            writer = Writer(stream, own, submitter) if seen else Afar()
            options = {"report": writer.write, "stop_asked": writer.stop_asked}
        result = function(communicator, *arguments, **options)
        try:
            communicator.meet("the end of the call")  # also with a rank that failed after its last
        except RankDied:  # who failed says so itself; engines start anew after a death
            communicator.dismiss()
            return result, communicator.lost, communicator.number
    except BaseException as error:
        cause = communicator.patience.trouble or error
        communicator.board.fail(f"{type(cause).__name__}: {cause}")
        communicator.dismiss()
        raise cause from (None if cause is error else error)
    if communicator.rank == 0:
        communicator.dismiss()
    with suppress(RankDied):  # the result is there, and engines start anew after a death
        communicator.close()
    return result, communicator.lost, communicator.number
