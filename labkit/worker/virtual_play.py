"""Training by programs on the virtual clock: time is simulated, but gradients are real."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.network import ComputeTime, Network
from labkit.programs.actions import TimingModel
from labkit.programs.program_state import ProgramState
from labkit.programs.virtual_runtime import VirtualRuntime

if TYPE_CHECKING:
    from labkit.strategies import ProgramStrategy
    from labkit.worker.played import ComputeBackend, ProgramSession

TRIALS = 5  # number of timed gradients; their median is the virtual compute time


class SimulatedTraining:
    """Training by programs in a simulated runtime, with real gradients from a compute backend.

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
        # for the type checker: `Experiment` requires `virtual` on the virtual clock
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
        # for the type checker: `_timing_model` returns a `TimingModel`
        assert isinstance(timing, TimingModel)
        seconds = exchanged["compute_seconds"] or 0.0, exchanged["update_seconds"]
        self.world.times = replace(timing, measured=seconds[0], update=seconds[1])
        self._backend.load_state(stage)

    def _declare_shared(self) -> None:
        # Saved states refer to these objects by name, because a restart creates them anew.
        self.world.keeps({"roles": self._backend.roles, "strategy": self._strategy})


def _timing_model(session: ProgramSession, stage: ComputeBackend) -> TimingModel:
    """Return the timing model for the virtual clock; measure compute times that are not given."""
    experiment, virtual = session.experiment, session.experiment.virtual
    # for the type checker: `Experiment` requires `virtual` on the virtual clock
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
