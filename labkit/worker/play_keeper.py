"""Keeps a play while it goes on, on either clock, and takes it up again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.state import decoding
from labkit.programs.program_state import ProgramState
from labkit.records.checkpoints import CheckpointContext
from labkit.records.pieces import Piece, Rank, file_of
from labkit.worker.recorder import SEND_EVERY
from labkit.worker.writing import Copied, Writing, versions

if TYPE_CHECKING:
    from labkit.programs.mpi_runtime import MpiRuntime
    from labkit.strategies import ProgramStrategy
    from labkit.worker.played import ComputeBackend, ProgramSession
    from labkit.worker.recorder import Recorder
    from labkit.worker.virtual_play import VirtualPlay


class PlayKeeper:
    """What both clocks do alike: each process writes down all that it has, in one file.

    Args:
        session: of the play.
        keeping: where and how often, and with what it begins.
        recorder: who wants training to end is asked here: what is kept then must not know of the
            wish.
    """

    def __init__(
        self, session: ProgramSession, keeping: CheckpointContext, recorder: Recorder
    ) -> None:
        self._session, self._keeping, self._recorder = session, keeping, recorder
        self._communicator, self._clock = session.communicator, session.communicator.clock
        self._wanted, recorder.stop_asked = recorder.stop_asked, lambda: recorder.stopped
        self._asked_at = self._taken_at = self._clock.now()
        self._writing = Writing(session.communicator, keeping)
        self._steps, self._costs, self._ends = 0, list[float](), False

    def _stops(self) -> bool:
        """Whether somebody wants training to end, asked now and then."""
        now = self._clock.now()
        if self._recorder.stopped or now - self._asked_at <= SEND_EVERY:
            return False
        self._asked_at = now
        return self._wanted()

    def _is_due(self, done: int) -> bool:
        """Whether it is time, after so many steps of all workers."""
        assert self._keeping.checkpoint is not None  # for the type checker: else nobody asks
        if self._keeping.checkpoint.steps is not None:
            return done - self._steps >= self._keeping.checkpoint.steps
        cost = float(np.median(self._costs)) if self._costs else None
        return self._clock.now() - self._taken_at >= self._keeping.checkpoint.interval(cost)

    def _write(self, kept: ProgramState, done: int) -> None:
        """Begin to write; arrays of what is kept may be written into later, and are copied."""
        pieces = [Piece.alone("form", np.frombuffer(kept.form.encode(), np.uint8))]
        pieces += [Piece.alone(f"array/{n}", array.copy()) for n, array in enumerate(kept.arrays)]
        manifest: dict[str, JSON] = {
            "taken": done,
            "position": [0, done],
            "steps": None,
            "ranks": self._communicator.size,
            "experiment": self._session.experiment.to_json(),
            "chosen": {},
            "versions": versions(),
        }
        self._writing.begin(Copied(done, pieces, (), {}, manifest))

    def _took(self, start: float, done: int) -> None:
        self._steps, self._taken_at = done, self._clock.now()
        self._costs.append(self._taken_at - start)

    def _resume(self, take: Callable[[ProgramState], object]) -> None:
        """Take what this process goes on with; without a checkpoint it begins."""
        if (resume := self._keeping.resume) is None:
            return
        path = file_of(Path(resume.folder), self._communicator.rank)
        with decoding(f"the state in {path}"):
            own = Rank(path).own()
            arrays = tuple(own[f"array/{n}"] for n in range(len(own) - 1))
            take(ProgramState(own["form"].tobytes().decode("ascii", "replace"), arrays))
        self._steps = resume.step
        if self._communicator.rank == 0:
            print("; ".join([f"goes on from step {resume.step}", *resume.notes]))

    def _summary(self) -> dict[str, JSON]:
        return {
            "taken": len(self._costs),
            "copy_seconds": float(np.median(self._costs)) if self._costs else None,
        }


class VirtualKeeper(PlayKeeper):
    """One process plays all, and is kept between two moments."""

    def play(self, play: VirtualPlay) -> None:
        """Play to the end, from the begin or from what was kept."""
        self._resume(play.take)
        if self._keeping.checkpoint is None:
            play.play()
            return
        play.play(self._look)
        self._session.checkpoints = self._summary()

    def _look(self, play: VirtualPlay) -> None:
        done, stops = len(self._recorder.rows), self._stops()
        if stops or self._is_due(done):
            start = self._clock.now()
            self._write(play.keep(), done)
            self._writing.wait()  # nothing here is measured
            self._took(start, done)
        self._recorder.stopped = self._recorder.stopped or stops


class RankKeeper(PlayKeeper):
    """Each rank plays those of its place; all stand still while each copies what it has.

    Rank 0 says when. A file is written beside training, one at a time: what is due before the last
    one is written waits for it.
    """

    def play(self, world: MpiRuntime, stage: ComputeBackend, played: ProgramStrategy) -> None:
        """Play to the end, from the begin or from what was kept."""
        # Programs refer to these, which are made anew.
        world.keeps({"roles": stage.roles, "strategy": played})
        program = partial(played.program, stage.roles)
        self._resume(lambda kept: stage.take(world.take(kept, program)))
        self._communicator.meet("what programs go on with")
        if self._keeping.checkpoint is None:
            world.play()
            return
        try:
            world.play(lambda own: self._look(own, stage))
            self._writing.wait()
        finally:
            self._writing.give_up()
        self._session.checkpoints = self._summary()

    def _look(self, world: MpiRuntime, stage: ComputeBackend) -> None:
        self._writing.check()
        assert world.still is not None  # for the type checker: see `play`
        if self._communicator.rank == 0:
            self._ends = self._ends or self._stops()
            done = world.still.steps_of_all
            new = done > self._steps and not self._recorder.stopped
            due = self._ends or (not self._writing.goes_on() and self._is_due(done))
            if new and due:
                world.still.ask()
            elif self._ends:  # nothing has happened since the last one
                self._recorder.stopped = True
        if not world.still.wanted:
            return
        start = self._clock.now()
        if (done_by_all := world.stands()) is not None:
            self._writing.wait()
            self._write(world.keep(stage.keep()), done_by_all)
            self._took(start, done_by_all)
            self._recorder.stopped = self._recorder.stopped or self._ends
