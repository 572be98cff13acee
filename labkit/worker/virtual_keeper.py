"""Keeps a play on the virtual clock while it goes on, and takes it up again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.content import JSON
from labkit.common.errors import InvalidInput
from labkit.programs.kept import Kept
from labkit.records import checkpoints
from labkit.records.checkpoints import Keeping
from labkit.records.pieces import Piece, Rank, file_of, write
from labkit.worker.keeper import is_ours, versions
from labkit.worker.recorder import SEND_EVERY

if TYPE_CHECKING:
    from labkit.worker.played import Playing
    from labkit.worker.recorder import Recorder
    from labkit.worker.virtual_play import VirtualPlay


class VirtualKeeper:
    """One process plays all: between two moments it writes down all that there is, in one file.

    Args:
        session: of the play.
        keeping: where and how often, and with what it begins.
        recorder: counts steps of all workers; who wants training to end is asked here: what is kept
            then must not know of the wish.
    """

    def __init__(self, session: Playing, keeping: Keeping, recorder: Recorder) -> None:
        self._session, self._keeping, self._recorder = session, keeping, recorder
        self._clock = session.communicator.clock
        self._wanted, recorder.stop_asked = recorder.stop_asked, lambda: False
        self._asked_at = self._taken_at = self._clock.now()
        self._steps, self._costs = 0, list[float]()

    def play(self, play: VirtualPlay) -> None:
        """Play to the end, from the begin or from what was kept.

        Raises:
            InvalidInput: what was kept is of another experiment.
        """
        if self._keeping.resume is not None:
            self._restore(play)
        if self._keeping.checkpoint is None:
            play.play()
            return
        play.play(self._look)
        self._session.checkpoints = {
            "taken": len(self._costs),
            "copy_seconds": float(np.median(self._costs)) if self._costs else None,
        }

    def _look(self, play: VirtualPlay) -> None:
        now, done = self._clock.now(), len(self._recorder.rows)
        stops = False
        if now - self._asked_at > SEND_EVERY:
            self._asked_at, stops = now, not self._recorder.stopped and self._wanted()
        if stops or self._is_due(now, done):
            self._take(play, done)
        self._recorder.stopped = self._recorder.stopped or stops

    def _is_due(self, now: float, done: int) -> bool:
        assert self._keeping.checkpoint is not None  # for the type checker: see `play`
        if self._keeping.checkpoint.steps is not None:
            return done - self._steps >= self._keeping.checkpoint.steps
        cost = float(np.median(self._costs)) if self._costs else None
        return now - self._taken_at >= self._keeping.checkpoint.interval(cost)

    def _take(self, play: VirtualPlay, done: int) -> None:
        assert self._keeping.checkpoint is not None  # for the type checker: see `play`
        start, kept = self._clock.now(), play.keep()
        folder = Path(self._keeping.folder) / f"{done}"
        folder.mkdir(parents=True, exist_ok=True)
        pieces = [Piece.alone("form", np.frombuffer(kept.form, np.uint8))]
        pieces += [Piece.alone(f"array/{n}", array) for n, array in enumerate(kept.arrays)]
        file = file_of(folder, 0)
        told = write(file, pieces, {"tensors": sorted(kept.tensors)})
        experiment = self._session.experiment
        if is_ours(self._keeping):
            manifest: dict[str, JSON] = {
                "taken": done,
                "position": [0, done],
                "steps": None,
                "ranks": 1,
                "experiment": experiment.to_json(),
                "chosen": {},
                "versions": versions(),
                "files": {file.name: told},
            }
            checkpoints.seal(folder, manifest)
            checkpoints.forget(folder.parent, self._keeping.checkpoint.keep)
        self._steps, self._taken_at = done, self._clock.now()
        self._costs.append(self._taken_at - start)

    def _restore(self, play: VirtualPlay) -> None:
        resume = self._keeping.resume
        assert resume is not None  # for the type checker: see `play`
        experiment = self._session.experiment
        if resume.manifest["experiment"] != json.loads(json.dumps(experiment.to_json())):
            raise InvalidInput(
                "on clock='virtual' a checkpoint is of all workers, messages and moments of one "
                "experiment, and this is another one; give the same, or begin anew"
            )
        rank = Rank(file_of(Path(resume.folder), 0))
        own = rank.own()
        arrays = tuple(own[f"array/{n}"] for n in range(len(own) - 1))
        tensors: list[int] = rank.told["tensors"]  # type: ignore[assignment]
        play.take(Kept(own["form"].tobytes(), arrays, frozenset(tensors)))
        self._steps = resume.step
        print("; ".join([f"goes on from step {resume.step}", *resume.notes]))
