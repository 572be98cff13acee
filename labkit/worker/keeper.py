"""When the state of a rank's training is kept, and what of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.state import decoding
from labkit.records.checkpoints import CheckpointContext
from labkit.records.pieces import Piece
from labkit.strategies import TrainingState
from labkit.worker.local_state import held
from labkit.worker.recorder import Recorder
from labkit.worker.restored import Restored
from labkit.worker.writing import Copied, Writing, versions

if TYPE_CHECKING:
    from labkit.worker.session import TrainingSession

AHEAD = 2  # steps from rank 0's wish to what is kept: no rank is further ahead of it


class Keeper(keras.callbacks.Callback):
    """Comes last: what all others have done in a step belongs to what is kept after it.

    Rank 0 says after which step; all ranks copy what they hold then, of what several hold alike
    each a share, and write it in a thread.

    Args:
        session: what is trained.
        keeping: where and how often, and with what it begins.
        kept: what this rank needs to go on.
        recorder: its rows go on.
    """

    def __init__(
        self,
        session: TrainingSession,
        keeping: CheckpointContext,
        kept: TrainingState,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self._session, self._keeping, self._kept = session, keeping, kept
        self._recorder, self._progress = recorder, session.progress
        self._communicator, self._clock = session.communicator, session.communicator.clock
        self._writing = Writing(self._communicator, keeping)
        self._asked, self._taken_at = -1, self._clock.now()
        self._costs: list[float] = []
        self._skipped, self._dropped = 0, set[str]()
        self._alone: dict[str, np.ndarray] = {}  # values of `own` variables, by name
        self._numbers: list[dict[str, float]] = []  # of the user's callbacks
        self._held = held(kept)
        if (resume := keeping.resume) is not None:
            with decoding(f"the state in {resume.folder or 'memory'}"):
                found = Restored(session, kept, self._held, recorder, resume, keeping.goes_on)
            self._alone, self._numbers, self._dropped = found.alone, found.numbers, found.dropped

    def on_train_begin(self, logs: Any = None) -> None:
        """What each rank has alone: others that begin a training may have made it alike."""
        for each in self._held:
            if each.own and each.name in self._alone:
                each.variable.assign(self._alone[each.name])
        for callback, numbers in zip(self._session.callbacks[1:], self._numbers, strict=False):
            vars(callback).update(numbers_of(numbers))  # a file may hold more than that

    def on_train_end(self, logs: Any = None) -> None:
        """To Keras, an epoch that was begun and those behind it are two trainings."""
        self._alone = {each.name: each.piece().values for each in self._held if each.own}
        self._numbers = self._of_callbacks()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keep what there is now, if it is time, or if somebody wants training to end."""
        if self._keeping.checkpoint is None:
            return
        step, board = self._progress.taken - 1, self._communicator.board
        self._writing.check()
        if board.asked_to_stop(step) or board.asked_to_keep(step):
            self._writing.wait()
            self._take()
        elif self._communicator.rank == 0 and self._is_due(step):
            if self._writing.goes_on():
                self._skipped += 1
            else:
                self._asked = step + AHEAD
                board.request_checkpoint(self._asked)

    def _is_due(self, step: int) -> bool:
        assert self._keeping.checkpoint is not None
        if step < self._asked:
            return False
        if self._keeping.checkpoint.steps is not None:
            return (step + 1 + AHEAD) % self._keeping.checkpoint.steps == 0
        now, interval = self._clock.now(), self._interval()
        if now - self._taken_at < interval:
            return False
        self._taken_at = now
        return True

    def _interval(self) -> float:
        assert self._keeping.checkpoint is not None
        cost = float(np.median(self._costs)) if self._costs else None
        return self._keeping.checkpoint.interval(cost)

    def _take(self) -> None:
        """Copy what this rank writes of the state; the rest goes on beside training."""
        start = self._clock.now()
        copied = self.copied()
        self._taken_at = self._clock.now()
        self._costs.append(self._taken_at - start)
        self._writing.begin(copied)

    @property
    def taken(self) -> int:
        """Steps, by now."""
        return self._progress.taken

    def copied(self) -> Copied:
        """A copy of this rank's share of what there is now."""
        readers = self._session.readers
        self._kept.settle()
        pieces = [
            each.piece()
            for number, each in enumerate(self._held)
            if each.own or number % readers.size == readers.rank
        ]
        for what, remember in self._kept.remembers.items():
            for name, values in remember.remembered().items():
                pieces.append(Piece.alone(f"remembers/{what}/{name}", np.array(values)))
        for number, variable in enumerate(self._session.model.metrics_variables):
            pieces.append(Piece.alone(f"metrics/{number}", np.array(variable.numpy())))
        rows = list(self._recorder.rows)
        told: dict[str, JSON] = {
            "epochs": list(self._recorder.epochs),
            "losses": list(self._progress.losses),
            "callbacks": self._of_callbacks(),
        }
        return Copied(self._progress.taken, pieces, rows, told, self._manifest())

    def _manifest(self) -> dict[str, JSON]:
        experiment, progress = self._session.experiment, self._progress
        return {
            "taken": progress.taken,
            "position": list(progress.position),
            "steps": self._session.feed.steps,
            "ranks": self._communicator.size,
            "experiment": experiment.to_json(),
            "chosen": dict(self._session.chosen),
            "versions": versions(),
        }

    def _of_callbacks(self) -> list[dict[str, float]]:
        return [numbers_of(vars(callback)) for callback in self._session.callbacks[1:]]

    def close(self) -> None:
        """Wait for what is being written."""
        self._writing.wait()

    def give_up(self) -> None:
        """Wait for nobody any more."""
        self._writing.give_up()

    def summary(self) -> dict[str, JSON]:
        """What there is to say of it, for the record."""
        found: dict[str, JSON] = {"begun_anew": sorted(self._dropped)} if self._dropped else {}
        if self._keeping.checkpoint is None:
            return found
        every = self._keeping.checkpoint.steps
        return found | {
            "taken": len(self._costs),
            "skipped": self._skipped,
            "copy_seconds": float(np.median(self._costs)) if self._costs else None,
            "interval_seconds": self._interval() if every is None else None,
            "interval_steps": every,
        }


def numbers_of(attributes: Mapping[str, Any]) -> dict[str, float]:
    """Those attributes of a callback that are public and numbers."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, int | float) and not name.startswith("_")
    }
