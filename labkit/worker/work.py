"""The training of an experiment on each rank, and the function that engine processes call first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common import reads
from labkit.common.canonical_json import JSON
from labkit.communicator import Communicator, RankDied, join
from labkit.experiment import Experiment
from labkit.network.fault import remaining_faults
from labkit.records import provenance
from labkit.records.checkpoints import CheckpointContext
from labkit.records.run_metrics import Event, RankResult, Verdict, WholeResult
from labkit.records.store import Record
from labkit.records.stream import StreamWriter, encode_lines, is_shared
from labkit.strategies import Batch, Strategy
from labkit.worker.source_bundle import enter_folder

if TYPE_CHECKING:
    from labkit.exchange import Timeline
    from labkit.model_parallel.memory import Memory
    from labkit.network import Slowdown
    from labkit.worker.peer_memory_recovery import PeerMemoryRecovery
    from labkit.worker.session import TrainingSession


class RemoteStream:
    """A rank's end of a progress stream, used if the rank and the submitter share no folder.

    The rank publishes records as data of its ipyparallel call. A `RemoteStream` must therefore be
    created within the ipyparallel call. A request to stop arrives as an abort of the call.
    ipyparallel drops calls that have not started. ipyparallel marks a running call as aborted.
    """

    def __init__(self) -> None:
        from IPython.core.getipython import get_ipython

        self._kernel = get_ipython().kernel
        self._call = self._kernel.get_parent()["header"]["msg_id"]
        self._published = 0

    def write(self, kind: str, records: Sequence[Record]) -> None:
        """Publish records of one kind, such as "step" or "epoch"."""
        from ipyparallel.engine.datapub import publish_data

        if records:
            publish_data(
                {str(self._published): encode_lines(kind, records)}
            )  # records with the same name would replace each other
            self._published += 1

    def stop_asked(self) -> bool:
        """Return whether a user has asked to stop."""
        return self._call in self._kernel.aborted


Report: TypeAlias = Callable[[str, list[Record]], None]


def work(
    communicator: Communicator,
    experiment: Experiment,
    checkpoint_context: CheckpointContext | None = None,
    report: Report = lambda kind, records: None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> RankResult:
    """Train an experiment with one seed on this rank.

    Args:
        communicator: Communicator of the ranks that run the experiment.
        experiment: Experiment to train; its `ranks` equals the size of the communicator.
        checkpoint_context: Folder and frequency of checkpoints, and the checkpoint to resume from.
            If None, the rank saves no checkpoints.
        report: Function (kind, records) that receives progress records, see
            `labkit.records.stream`.
        stop_asked: Function that rank 0 polls. If `stop_asked` returns True, all ranks end training
            after the same step.
    """
    from labkit.keras import use_one_device
    from labkit.worker.peer_memory_recovery import PeerMemoryRecovery, RestartTraining
    from labkit.worker.rank_state import restore

    use_one_device(communicator)
    goes_on = experiment.strategy.resumable and not experiment.uses_programs
    if experiment.clock == "wall" and experiment.stragglers:
        communicator.set_slowdown(_slow_ranks(experiment), experiment.seed)
    communicator.rules.checks = experiment.checksums
    peer_recovery = (
        PeerMemoryRecovery(communicator, report) if communicator.membership is not None else None
    )
    try:
        while True:
            try:
                begun = checkpoint_context
                if peer_recovery is not None and peer_recovery.pending:
                    begun = peer_recovery.admit_spares(checkpoint_context)
                    failed = peer_recovery.faults[-1]["ranks"]
                    experiment = experiment.replace(
                        faults=remaining_faults(experiment.faults, failed)
                    )
                return _train(communicator, experiment, begun, report, stop_asked, peer_recovery)
            except RestartTraining:
                continue
            except Exception:
                if peer_recovery is None or not peer_recovery.is_possible or not goes_on:
                    raise
                peer_recovery.continue_without_failed()
    finally:
        restore()


def _slow_ranks(experiment: Experiment) -> dict[int, Slowdown]:
    """Return the slowdown of each rank of a slow worker, and of each slow extra rank."""
    workers, slow = experiment.workers, experiment.slowdowns
    slowdowns = {rank: slowdown for rank, slowdown in slow.items() if rank >= workers}
    for worker in slow.keys() - slowdowns.keys():
        slowdowns |= dict.fromkeys(experiment.strategy.places(worker, workers), slow[worker])
    return slowdowns


def _train(
    communicator: Communicator,
    experiment: Experiment,
    checkpoint_context: CheckpointContext | None,
    report: Report,
    stop_asked: Callable[[], bool],
    peer_recovery: PeerMemoryRecovery | None = None,
) -> RankResult:
    from labkit.communicator.clock import offset
    from labkit.exchange.compressed import CompressionStats
    from labkit.model_parallel import memory
    from labkit.worker import equivalence, step_monitor
    from labkit.worker.feed import read
    from labkit.worker.recorder import Recorder
    from labkit.worker.resource_monitor import ResourceMonitor
    from labkit.worker.session import TrainingSession

    def tell(kind: str, **record: str | int | None) -> None:
        if communicator.rank == 0:
            report(kind, [record])

    tell("doing", what="reading data")
    source = read(experiment, communicator)
    tell("doing", what="checking equivalence")
    verdict = equivalence.verify(experiment, communicator, source)
    tell("doing", what="building the model")
    session = TrainingSession(experiment, communicator, source)
    tell("plan", steps=session.feed.steps)
    recorder = Recorder(communicator, report, stop_asked)
    recorder.timeline = session.timeline
    session.callbacks.insert(0, recorder)
    session.recorder = recorder
    session.peer_recovery = peer_recovery
    if checkpoint_context is not None:
        session.set_checkpoints(checkpoint_context)
    every = experiment.strategy.stats_interval
    microscope = CompressionStats(communicator, every) if every else None
    if microscope is not None:
        session.watchers.append(microscope.observe)
    step_monitor.install(session, recorder)
    memory.reset_peak()
    offsets = [offset(communicator.clock, communicator.allgather)]
    tell("doing", what="training")
    try:
        with ResourceMonitor() as resources:
            experiment.strategy.train(session)
    except Exception:
        # The recorder reports the rows that the rank had recorded before the failure.
        recorder.say()
        raise
    measure = partial(offset, communicator.clock, communicator.allgather)
    offsets.append(session.outlive(measure))
    tell("doing", what="evaluating")
    if microscope is not None:
        for step, figures in microscope.by_step().items():
            recorder.rows[step - recorder.begin] |= figures
    memory_by_kind, peak = session.memory or _memory(session), memory.peak()
    session.close()
    evaluation = session.outlive(session.evaluate)
    # The exchange is read before the call of `session.saved`, which drops the exchange.
    exchange = session.exchange()
    whole = session.outlive(partial(_whole, session, verdict, evaluation, exchange, peer_recovery))
    return RankResult(
        rows=recorder.rows,
        memory=memory_by_kind,
        peak=peak,
        stopped=recorder.stopped,
        timeline=_events(recorder.timeline),
        offsets=offsets if communicator.size > 1 else [],
        compression_stats=microscope.rows if microscope is not None else [],
        resources=resources.rows,
        layers=session.layers,
        nonfinite=session.guard.records if session.guard is not None else [],
        update_log=session.interleaving,
        whole=whole,
    )


def _whole(
    session: TrainingSession,
    verdict: Verdict,
    evaluation: dict[str, float],
    exchange: dict[str, JSON] | None,
    peer_recovery: PeerMemoryRecovery | None,
) -> WholeResult | None:
    """Wait until all ranks have ended; return the results on the first rank, otherwise None."""
    from labkit.records import write

    communicator, recovery = session.communicator, session.recovery
    whole = None
    # If training can survive rank failures, rank 1 returns the results as well as rank 0.
    if communicator.rank < (1 if recovery is None else 2):
        assert session.recorder is not None
        whole = WholeResult(
            epochs=session.recorder.epochs,
            evaluation=evaluation,
            equivalence=verdict,
            environment=write.describe(),
            exchange=exchange,
            partition=session.partition or None,
            checkpoints=session.checkpoints,
            faults=[
                *(peer_recovery.faults if peer_recovery is not None else []),
                *(recovery.faults if recovery is not None else []),
            ],
            membership_history=recovery.stretches if recovery is not None else [],
            # The method `saved` must run last, because it compiles the model again.
            model=session.saved(),
        )
    communicator.barrier("the end of training")
    return whole


def prepare() -> None:
    """Import the modules that training needs and collect garbage, so that a first run is fast."""
    import labkit.worker.session  # noqa: F401 - imports all modules that training needs
    from labkit.worker.rank_state import leave_modules

    leave_modules()


def infer(
    communicator: Communicator, file: str | bytes, strategy: Strategy, x: Batch, batch_size: int
) -> Batch | None:
    """Predict the rows of x with a saved model; return this rank's predictions, None if no rows.

    Args:
        communicator: Communicator of the ranks that compute predictions together.
        file: Saved Keras model, given as a path or as bytes.
        strategy: Strategy that divides the model.
        x: Array (rows, …), or a nested structure of such arrays; it is the same on all ranks.
        batch_size: Number of rows in one forward pass.
    """
    from labkit.keras import use_one_device
    from labkit.worker import inference
    from labkit.worker.rank_state import restore

    use_one_device(communicator)
    try:
        return inference.predict(communicator, inference.load(file), strategy, x, batch_size)
    finally:
        restore()


def _memory(session: TrainingSession) -> Memory:
    """Return the memory use of a rank, for strategies that do not divide the model."""
    from labkit.model_parallel import memory

    experiment, model, workers = session.experiment, session.model, session.communicator.size
    rows = experiment.strategy.rows(experiment.batch_size, workers)
    plain = session.optimizer()
    # All workers of a simulation share one process. The memory use of the shared process is not
    # that of one worker.
    look = workers == 1 and not experiment.uses_programs
    return memory.by_kind(model, model, model.optimizer, plain, rows, look=look)


def _events(timeline: Timeline | None) -> list[Event]:
    """Return the events of a timeline; return [] if all of them are of the kind "step"."""
    events = list(timeline.events) if timeline is not None else []
    return events if any(kind != "step" for kind, *_ in events) else []


def main(payload: bytes) -> Any:
    """Run a task's function on this rank; this is the function that an engine process calls.

    A task has the entries `call`, `ranks`, `spares` and `limit`. The entry `call` holds a function
    and its arguments, pickled. The entry `spares` is the number of spare ranks, and `limit` a
    timeout. The task also has the entries `network`, `folder`, `modules`, `luggage` and
    `environment`. The entry `stream` of a task is a folder, and `submitter` a process. The function
    of a streaming task can report progress and learns of stop requests. The module
    `labkit.records.stream` explains `report` and `stop_asked`. The entry `deaths` of the task is
    the number of earlier rank failures.

    A rank that fails writes its error to a status table, which all ranks read. If a rank fails, the
    ranks that wait for it raise an error. Every engine process therefore remains usable after a
    failure.

    Returns:
        The function's result, the failed ranks, the number of this rank, and the inputs that the
        rank has read. A spare rank without work returns (None, [], None, None).
    """
    import cloudpickle

    task = cloudpickle.loads(payload)
    os.environ.update(task["environment"])
    if task["spares"]:
        prepare()
    communicator = join(task["ranks"], task["spares"], task["limit"], task["network"])
    if communicator is None:
        return None, [], None, None
    communicator.deaths = task.get("deaths", 0)
    try:
        enter_folder(task["folder"], task["modules"], task["luggage"])
        reads.forget()
        function, arguments = cloudpickle.loads(task["call"])
        options: dict[str, Callable[..., bool | None]] = {}
        if "stream" in task:
            stream, submitter = Path(task["stream"]), task["submitter"]
            shares_folder = is_shared(stream, submitter)
            member = (
                communicator.number
                if communicator.membership is None
                else communicator.membership.member(communicator.number)
            )
            writer = StreamWriter(stream, member, submitter) if shares_folder else RemoteStream()
            options = {"report": writer.write, "stop_asked": writer.stop_asked}
        result = function(communicator, *arguments, **options)
        try:
            # The barrier detects ranks that failed after they had returned from the called
            # function.
            communicator.barrier("the end of the call")
        except RankDied:  # A failed rank reports its own failure, and its engine restarts.
            communicator.release_spares()
            return result, communicator.lost, communicator.number, provenance.inputs()
    except BaseException as error:
        cause = communicator.wait_policy.first_error or error
        communicator.board.fail(f"{type(cause).__name__}: {cause}")
        communicator.release_spares()
        raise cause from (None if cause is error else error)
    if communicator.rank == 0:
        communicator.release_spares()
    # A rank failure at the end does no harm, because the result is complete. The engine of the
    # failed rank restarts.
    with suppress(RankDied):
        communicator.close()
    return result, communicator.lost, communicator.number, provenance.inputs()
