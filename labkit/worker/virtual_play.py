"""Training by programs on the virtual clock, which may be kept between two moments."""

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
from labkit.programs.program_state import ProgramState
from labkit.programs.timing import TimingModel
from labkit.programs.virtual_runtime import VirtualRuntime

if TYPE_CHECKING:
    from labkit.strategies import ProgramStrategy
    from labkit.worker.played import ComputeBackend, ProgramSession

TRIALS = 5  # gradients whose median is what one takes on the virtual clock


class VirtualPlay:
    """A world on the virtual clock, and the stage on which it computes.

    Args:
        session: whose model, data and recorder.
        played: the strategy.
        stage: of all its programs.
    """

    def __init__(
        self, session: ProgramSession, played: ProgramStrategy, stage: ComputeBackend
    ) -> None:
        self._session, self._stage, self._played = session, stage, played
        experiment, roles = session.experiment, stage.roles
        order: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for server, worker, step in experiment.order:
            order[server] += [(member, step) for member in roles.members(worker)]
        lost = {tuple(roles.members(worker)): moment for worker, moment in experiment.lost}
        killed = {fault.rank: fault.step for fault in experiment.faults if fault.kind == "kill"}
        self._program = partial(played.program, roles)
        self.world = VirtualRuntime(
            {number: self._program(number) for number in range(len(roles.hosts))},
            *(roles.hosts, stage, stage.diary, _laws(session, stage)),
            network=Network.parse(experiment.network),
            shapes=stage.replica.shapes,
            seed=experiment.seed,
            script=order,
            lost=lost,
            servers=roles.servers,
            killed=killed,
            injectors=session.injectors,
        )

    def play(self, between: Callable[[VirtualPlay], None] | None = None) -> None:
        """Play to the end.

        Args:
            between: called between two moments, where it may be kept.

        Raises:
            InvalidInput: it shall be kept, and replicas are cut.
        """
        if between is None:
            self.world.play()
        else:
            if self._played.replica_cut != 1:
                raise InvalidInput(
                    "replicas that are cut into stages or tiles have activations under way, which "
                    "are not kept; leave the checkpoint out, or give stages=1 and no grid"
                )
            self._keeps()
            self.world.play(lambda world: between(self))
        session, losses = self._session, self._stage.diary.losses
        if session.exchanged is not None and losses:
            session.exchanged["lost"] = [dict(loss) for loss in losses]

    def keep(self) -> ProgramState:
        """All of it, as it is between two moments."""
        return self.world.keep((self._stage.keep(), self._session.exchanged))

    def take(self, kept: ProgramState) -> None:
        """Go on from what was kept of the same experiment."""
        self._keeps()
        stage, exchanged = self.world.take(kept, self._program)
        laws, self._session.exchanged = self.world.times, exchanged
        assert isinstance(laws, TimingModel)  # for the type checker: see `_laws`
        seconds = exchanged["compute_seconds"] or 0.0, exchanged["update_seconds"]
        self.world.times = replace(laws, measured=seconds[0], update=seconds[1])
        self._stage.take(stage)

    def _keeps(self) -> None:
        # Programs refer to these, which are made anew.
        self.world.keeps({"roles": self._stage.roles, "strategy": self._played})


def _laws(session: ProgramSession, stage: ComputeBackend) -> TimingModel:
    """What things take on the virtual clock; measured here, where the experiment does not say."""
    experiment = session.experiment
    compute = experiment.compute or ComputeTime()
    measures = compute.seconds is None and compute.values is None
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
    later = {(worker, step): seconds for worker, step, seconds in experiment.later}
    given = compute, experiment.slowed, experiment.seed, measured, update, later
    return TimingModel(*given, experiment.faults)


def _median(now: Callable[[], float], once: Callable[[], object]) -> float:
    """Seconds that it takes, after two calls that warm up."""
    found = []
    for _ in range(2 + TRIALS):
        start = now()
        once()
        found.append(now() - start)
    return statistics.median(found[2:])
