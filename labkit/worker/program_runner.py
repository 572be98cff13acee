"""The runner of programs, on the virtual clock or over MPI; it also saves their state."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.state import decoding
from labkit.communicator import open_mailbox
from labkit.network import ComputeTime, Network
from labkit.programs.actions import TimingModel
from labkit.programs.mpi_runtime import MpiRuntime
from labkit.programs.program_state import ProgramState
from labkit.programs.virtual_runtime import VirtualRuntime
from labkit.records.checkpoints import CheckpointContext
from labkit.records.tensor_boxes import RankFile, TensorBox, rank_file
from labkit.strategies import ProgramStrategy
from labkit.worker.checkpoint_files import CheckpointWriter, StateCopy, versions
from labkit.worker.compute_backend import ComputeBackend, ProgramSession
from labkit.worker.recorder import SEND_EVERY

if TYPE_CHECKING:
    from labkit.programs.mpi_runtime import MpiRuntime
    from labkit.strategies import ProgramStrategy
    from labkit.worker.compute_backend import ComputeBackend, ProgramSession
    from labkit.worker.recorder import Recorder


TRIALS = 5  # The virtual compute time is the median time of `TRIALS` gradients.


class SimulatedTraining:
    """Training in a simulated runtime, with one program per worker and real gradients.

    Args:
        session: Session that provides the model, the data and the recorder.
        strategy: Strategy that runs as one program per worker and per server.
        stage: The compute backend that all programs use.
    """

    def __init__(
        self, session: ProgramSession, strategy: ProgramStrategy, stage: ComputeBackend
    ) -> None:
        self._session, self._backend, self._strategy = session, stage, strategy
        experiment, roles = session.experiment, stage.roles
        virtual = experiment.virtual
        # The assertion tells the type checker that an experiment on the virtual clock has
        # `virtual`.
        assert virtual is not None
        order: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for server, worker, step in virtual.update_order:
            order[server] += [(member, step) for member in roles.members(worker)]
        failures = virtual.worker_failures
        lost = {tuple(roles.members(worker)): moment for worker, moment in failures}
        killed = {fault.rank: fault.step for fault in experiment.faults if fault.kind == "kill"}
        self._program = partial(strategy.program, roles)
        self.world = VirtualRuntime(
            {number: self._program(number) for number in range(len(roles.hosts))},
            *(roles.hosts, stage, stage.diary, _timing_model(session, stage)),
            network=Network.parse(experiment.network),
            shapes=stage.replica.shapes,
            seed=experiment.seed,
            script=order,
            lost=lost,
            servers=roles.servers,
            killed=killed,
            injectors=session.injectors,
        )

    def play(self, between: Callable[[SimulatedTraining], None] | None = None) -> None:
        """Run the simulated training to its end.

        Args:
            between: Function that is called between two simulated events, for example to save a
                checkpoint.

        Raises:
            InvalidInput: If `between` is given, but replicas are divided into stages or tiles.
        """
        if between is None:
            self.world.play()
        else:
            if self._strategy.replica_cut != 1:
                raise InvalidInput(
                    "checkpoints do not support replicas that are divided into stages or tiles, "
                    "because activations are in flight; remove the checkpoint, or give stages=1 "
                    "and no grid"
                )
            self._declare_shared()
            self.world.play(lambda world: between(self))
        session, losses = self._session, self._backend.diary.losses
        if session.exchanged is not None and losses:
            session.exchanged["lost"] = [dict(loss) for loss in losses]

    def save_state(self) -> ProgramState:
        """Return the complete state of the simulation, between two simulated events."""
        return self.world.keep((self._backend.save_state(), self._session.exchanged))

    def load_state(self, state: ProgramState) -> None:
        """Restore a state that was saved by a simulation of the same experiment."""
        self._declare_shared()
        stage, exchanged = self.world.take(state, self._program)
        timing, self._session.exchanged = self.world.times, exchanged
        # The assertion tells the type checker that `_timing_model` returns a `TimingModel`.
        assert isinstance(timing, TimingModel)
        seconds = exchanged["compute_seconds"] or 0.0, exchanged["update_seconds"]
        self.world.times = replace(timing, measured=seconds[0], update=seconds[1])
        self._backend.load_state(stage)

    def _declare_shared(self) -> None:
        # A saved state stores the roles and the strategy only by name, because a restart creates
        # new objects.
        self.world.keeps({"roles": self._backend.roles, "strategy": self._strategy})


def _timing_model(session: ProgramSession, stage: ComputeBackend) -> TimingModel:
    """Return the timing model for the virtual clock; measure compute times that are not given."""
    experiment, virtual = session.experiment, session.experiment.virtual
    # The assertion tells the type checker that an experiment on the virtual clock has `virtual`.
    assert virtual is not None
    compute = virtual.compute_time or ComputeTime()
    measures = compute.seconds is None and compute.trace is None
    measured = update = 0.0
    if measures:
        first = session.batches()
        measured = _median(session.communicator.clock.now, partial(stage.replica.try_out, first))
    if compute.update is not None:
        update = compute.update
    elif measures:
        holder = stage.roles.servers[0] if stage.roles.parts else 0
        shard = stage.shard(holder)
        nothing = np.zeros(shard.part.size, stage.roles.weights.dtype)
        update = _median(session.communicator.clock.now, partial(shard.update, nothing))
    session.exchanged = {"compute_seconds": measured or compute.seconds, "update_seconds": update}
    delays = {(worker, step): seconds for worker, step, seconds in virtual.message_delays}
    arguments = compute, experiment.slowdowns, experiment.seed, measured, update, delays
    return TimingModel(*arguments, experiment.faults)


def _median(now: Callable[[], float], call: Callable[[], object]) -> float:
    """Return the median duration of a call in seconds, after two warm-up calls."""
    seconds = []
    for _ in range(2 + TRIALS):
        start = now()
        call()
        seconds.append(now() - start)
    return statistics.median(seconds[2:])


class ProgramKeeper:
    """The base class for checkpoints of programs; each process writes one file with its state.

    Args:
        session: Training session that runs the programs.
        checkpoint_context: Folder and frequency of checkpoints, and the checkpoint to resume from.
        recorder: Recorder of the session. The keeper replaces `stop_asked` of the recorder, because
            a checkpoint must not contain a user's request to stop.
    """

    def __init__(
        self, session: ProgramSession, checkpoint_context: CheckpointContext, recorder: Recorder
    ) -> None:
        self._session, self._context, self._recorder = session, checkpoint_context, recorder
        self._communicator, self._clock = session.communicator, session.communicator.clock
        self._stop_requested, recorder.stop_asked = recorder.stop_asked, lambda: recorder.stopped
        self._polled_at = self._taken_at = self._clock.now()
        self._writer = CheckpointWriter(session.communicator, checkpoint_context)
        self._steps, self._costs, self._ends = 0, list[float](), False

    def _stops(self) -> bool:
        """Return whether a user has asked to stop; poll the request at most every 0.25 seconds."""
        now = self._clock.now()
        if self._recorder.stopped or now - self._polled_at <= SEND_EVERY:
            return False
        self._polled_at = now
        return self._stop_requested()

    def _is_due(self, steps_done: int) -> bool:
        """Return whether a checkpoint is due; `steps_done` counts the steps of all workers."""
        # The assertion tells the type checker that callers require a checkpoint setting.
        assert self._context.checkpoint is not None
        if self._context.checkpoint.steps is not None:
            return steps_done - self._steps >= self._context.checkpoint.steps
        cost = float(np.median(self._costs)) if self._costs else None
        return self._clock.now() - self._taken_at >= self._context.checkpoint.interval(cost)

    def _write(self, state: ProgramState, steps_done: int) -> None:
        """Start to write a state; its arrays are copied first, because programs may change them."""
        pieces = [TensorBox.local("form", np.frombuffer(state.form.encode(), np.uint8))]
        pieces += [
            TensorBox.local(f"array/{n}", array.copy()) for n, array in enumerate(state.arrays)
        ]
        manifest: dict[str, JSON] = {
            "taken": steps_done,
            "position": [0, steps_done],
            "steps": None,
            "ranks": self._communicator.size,
            "experiment": self._session.experiment.to_json(),
            "chosen": {},
            "versions": versions(),
        }
        self._writer.begin(StateCopy(steps_done, pieces, (), {}, manifest))

    def _note_checkpoint(self, start: float, steps_done: int) -> None:
        self._steps, self._taken_at = steps_done, self._clock.now()
        self._costs.append(self._taken_at - start)

    def _resume(self, take: Callable[[ProgramState], object]) -> None:
        """Restore this process's state from the checkpoint to resume from, if there is one."""
        if (resume := self._context.resume) is None:
            return
        path = rank_file(Path(resume.folder), self._communicator.rank)
        with decoding(f"the state in {path}"):
            arrays_by_name = RankFile(path).local_tensors()
            arrays = tuple(arrays_by_name[f"array/{n}"] for n in range(len(arrays_by_name) - 1))
            take(ProgramState(arrays_by_name["form"].tobytes().decode("ascii", "replace"), arrays))
        self._steps = resume.step
        if self._communicator.rank == 0:
            print("; ".join([f"resuming from step {resume.step}", *resume.notes]))

    def _summary(self) -> dict[str, JSON]:
        return {
            "taken": len(self._costs),
            "copy_seconds": float(np.median(self._costs)) if self._costs else None,
        }


class SimulationKeeper(ProgramKeeper):
    """Saves checkpoints between the events of a simulation, which runs in a single process."""

    def play(self, play: SimulatedTraining) -> None:
        """Run all programs to their end, from the start or from a checkpoint."""
        self._resume(play.load_state)
        if self._context.checkpoint is None:
            play.play()
            return
        play.play(self._save_if_due)
        self._session.checkpoints = self._summary()

    def _save_if_due(self, play: SimulatedTraining) -> None:
        steps_done, stops = len(self._recorder.rows), self._stops()
        if stops or self._is_due(steps_done):
            start = self._clock.now()
            self._write(play.save_state(), steps_done)
            # In a simulation, writing the checkpoint file takes no virtual time.
            self._writer.wait()
            self._note_checkpoint(start, steps_done)
        self._recorder.stopped = self._recorder.stopped or stops


class RankProgramKeeper(ProgramKeeper):
    """Saves checkpoints of programs on ranks; all ranks pause while they copy their states.

    Rank 0 decides when the next checkpoint is due. One thread writes one file at a time. A
    checkpoint starts only after the previous checkpoint is written.
    """

    def play(self, world: MpiRuntime, stage: ComputeBackend, strategy: ProgramStrategy) -> None:
        """Run all programs to their end, from the start or from a checkpoint."""
        # A saved state stores the roles and the strategy only by name, because a restart creates
        # new objects.
        world.keeps({"roles": stage.roles, "strategy": strategy})
        program = partial(strategy.program, stage.roles)
        self._resume(lambda state: stage.load_state(world.take(state, program)))
        self._communicator.barrier("the initial state of the programs")
        if self._context.checkpoint is None:
            world.play()
            return
        try:
            world.play(lambda runtime: self._save_if_due(runtime, stage))
            self._writer.wait()
        finally:
            self._writer.stop_waiting()
        self._session.checkpoints = self._summary()

    def _save_if_due(self, world: MpiRuntime, stage: ComputeBackend) -> None:
        self._writer.check()
        # The assertion tells the type checker that `world.keeps` has set `still`.
        assert world.still is not None
        if self._communicator.rank == 0:
            self._ends = self._ends or self._stops()
            steps_done = world.still.steps_of_all
            new = steps_done > self._steps and not self._recorder.stopped
            due = self._ends or (not self._writer.is_writing() and self._is_due(steps_done))
            if new and due:
                world.still.ask()
            elif self._ends:  # No worker has taken a step since the last checkpoint.
                self._recorder.stopped = True
        if not world.still.wanted:
            return
        start = self._clock.now()
        if (done_by_all := world.stands()) is not None:
            self._writer.wait()
            self._write(world.keep(stage.save_state()), done_by_all)
            self._note_checkpoint(start, done_by_all)
            self._recorder.stopped = self._recorder.stopped or self._ends


def play(session: ProgramSession, strategy: ProgramStrategy) -> ComputeBackend:
    """Train by running a strategy's programs on the experiment's clock ("wall" or "virtual").

    After the programs end, the model of the session has the trained weights. The layer states (such
    as moving statistics) of the trained model are those of worker 0. If the weights are a mean over
    workers, the layer states are a mean, too.

    Returns:
        The compute backend, which knows the roles of all programs and has computed their gradients.
    """
    experiment, communicator = session.experiment, session.communicator
    session.compile(session.optimizer())
    stage = ComputeBackend(session, strategy)
    numbers = range(len(stage.roles.hosts))
    virtual = experiment.clock == "virtual"
    local_numbers = [n for n in numbers if virtual or stage.roles.hosts[n] == communicator.rank]
    stage.hold(local_numbers)
    if virtual:
        virtual_play = SimulatedTraining(session, strategy, stage)
        if session.checkpoint_context is None or session.recorder is None:
            virtual_play.play()
        else:
            SimulationKeeper(session, session.checkpoint_context, session.recorder).play(
                virtual_play
            )
        stage.leave()
        return stage
    roles, hosts = stage.roles, stage.roles.hosts
    is_compressed = stage.compressor is not None
    routes = roles.routes(is_compressed) if strategy.transport != "two_sided" else {}
    mailbox = open_mailbox(strategy.transport, communicator, routes, hosts)
    dtype, serves_concurrently = (
        np.dtype(np.uint8) if is_compressed else roles.weights.dtype,
        strategy.serves_concurrently,
    )
    ranks = MpiRuntime(
        {number: strategy.program(roles, number) for number in local_numbers},
        hosts,
        communicator,
        stage,
        stage.diary,
        dtype,
        meanwhile=serves_concurrently,
        mailbox=mailbox,
        shapes=stage.replica.shapes,
        seed=experiment.seed,
    )
    if session.checkpoint_context is None or session.recorder is None:
        ranks.play()
    else:
        RankProgramKeeper(session, session.checkpoint_context, session.recorder).play(
            ranks, stage, strategy
        )
    stage.leave()
    mailbox.close()  # The mailbox is closed last, because the model may use the mailbox's buffers.
    return stage
