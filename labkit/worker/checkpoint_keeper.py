"""A Keras callback that decides when a rank saves its training state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.state import decoding
from labkit.records.checkpoints import CheckpointContext
from labkit.records.tensor_boxes import TensorBox
from labkit.strategies import TrainingState
from labkit.worker.checkpoint_files import CheckpointWriter, StateCopy, StateRestorer, versions
from labkit.worker.local_state import local_variables
from labkit.worker.recorder import AHEAD, Recorder

if TYPE_CHECKING:
    from labkit.worker.rank_state import RankState


class CheckpointKeeper(keras.callbacks.Callback):
    """A Keras callback that saves checkpoints; it runs last and sees what other callbacks change.

    Rank 0 announces the training step after which a checkpoint is saved. After the announced step,
    each rank copies its state, and a thread writes the copy. If several ranks have the same state,
    each of them saves a part of it.

    Args:
        session: Training session of this rank.
        checkpoint_context: Folder and frequency of checkpoints, and the checkpoint to resume from.
        state: State that this rank must save so that training can resume.
        recorder: Recorder of the history rows, which checkpoints also contain.
    """

    def __init__(
        self,
        session: RankState,
        checkpoint_context: CheckpointContext,
        state: TrainingState,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self._session, self._context, self._state = session, checkpoint_context, state
        self._recorder, self._progress = recorder, session.progress
        self._communicator, self._clock = session.communicator, session.communicator.clock
        self._writer = CheckpointWriter(self._communicator, checkpoint_context)
        self._requested_step, self._copied_at = -1, self._clock.now()
        self._costs: list[float] = []
        self._skipped, self._dropped = 0, set[str]()
        # The dict `_local_values` holds the values that differ between ranks.
        self._local_values: dict[str, np.ndarray] = {}
        # The list `_numbers` holds numeric attributes of the user's callbacks.
        self._numbers: list[dict[str, float]] = []
        self._local_variables = local_variables(state)
        if (resume := checkpoint_context.resume) is not None:
            with decoding(f"the state in {resume.folder or 'memory'}"):
                restorer = StateRestorer(
                    session,
                    state,
                    self._local_variables,
                    recorder,
                    resume,
                    checkpoint_context.goes_on,
                )
            self._local_values, self._numbers, self._dropped = (
                restorer.alone,
                restorer.numbers,
                restorer.dropped,
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore values that differ between ranks; other callbacks may have made them equal."""
        for local in self._local_variables:
            if local.is_local and local.name in self._local_values:
                local.variable.assign(self._local_values[local.name])
        for callback, numbers in zip(self._session.callbacks[1:], self._numbers, strict=False):
            # The function `numbers_of` ignores values that are not numbers.
            vars(callback).update(numbers_of(numbers))

    def on_train_end(self, logs: Any = None) -> None:
        """Save values that differ between ranks, as later epochs may run in another `fit` call."""
        self._local_values = {
            local.name: local.piece().values for local in self._local_variables if local.is_local
        }
        self._numbers = self._callback_numbers()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save a checkpoint if it is due or if training is about to stop."""
        if self._context.checkpoint is None:
            return
        step, board = self._progress.taken - 1, self._communicator.board
        self._writer.check()
        if board.is_stop_requested(step) or board.is_checkpoint_requested(step):
            self._writer.wait()
            self._copy_and_write()
        elif self._communicator.rank == 0 and self._is_due(step):
            if self._writer.is_writing():
                self._skipped += 1
            else:
                self._requested_step = step + AHEAD
                board.request_checkpoint(self._requested_step)

    def _is_due(self, step: int) -> bool:
        assert self._context.checkpoint is not None
        if step < self._requested_step:
            return False
        if self._context.checkpoint.steps is not None:
            return (step + 1 + AHEAD) % self._context.checkpoint.steps == 0
        now, interval = self._clock.now(), self._interval()
        if now - self._copied_at < interval:
            return False
        self._copied_at = now
        return True

    def _interval(self) -> float:
        assert self._context.checkpoint is not None
        cost = float(np.median(self._costs)) if self._costs else None
        return self._context.checkpoint.interval(cost)

    def _copy_and_write(self) -> None:
        """Copy this rank's part of the state, then start a thread that writes it to a file."""
        start = self._clock.now()
        copied = self.copied()
        self._copied_at = self._clock.now()
        self._costs.append(self._copied_at - start)
        self._writer.begin(copied)

    @property
    def steps_taken(self) -> int:
        """Total number of training steps taken so far."""
        return self._progress.taken

    def copied(self) -> StateCopy:
        """Return a copy of this rank's part of the current training state."""
        readers = self._session.readers
        self._state.settle()
        pieces = [
            local.piece()
            for number, local in enumerate(self._local_variables)
            if local.is_local or number % readers.size == readers.rank
        ]
        for what, remember in self._state.remembers.items():
            for name, values in remember.state_dict().items():
                pieces.append(TensorBox.local(f"remembers/{what}/{name}", np.array(values)))
        for number, variable in enumerate(self._session.model.metrics_variables):
            pieces.append(TensorBox.local(f"metrics/{number}", np.array(variable.numpy())))
        rows = list(self._recorder.rows)
        details: dict[str, JSON] = {
            "epochs": list(self._recorder.epochs),
            "losses": list(self._progress.losses),
            "callbacks": self._callback_numbers(),
        }
        return StateCopy(self._progress.taken, pieces, rows, details, self._manifest())

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

    def _callback_numbers(self) -> list[dict[str, float]]:
        return [numbers_of(vars(callback)) for callback in self._session.callbacks[1:]]

    def close(self) -> None:
        """Wait until the checkpoint in progress is written."""
        self._writer.wait()

    def stop_waiting(self) -> None:
        """Stop waiting for the checkpoint files of other ranks, after a rank failure."""
        self._writer.stop_waiting()

    def summary(self) -> dict[str, JSON]:
        """Return the number, the cost and the interval of checkpoints for the run's record."""
        entries: dict[str, JSON] = {"begun_anew": sorted(self._dropped)} if self._dropped else {}
        if self._context.checkpoint is None:
            return entries
        every = self._context.checkpoint.steps
        return entries | {
            "taken": len(self._costs),
            "skipped": self._skipped,
            "copy_seconds": float(np.median(self._costs)) if self._costs else None,
            "interval_seconds": self._interval() if every is None else None,
            "interval_steps": every,
        }


def numbers_of(attributes: Mapping[str, Any]) -> dict[str, float]:
    """Return those attributes of a callback that are public and numeric."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, int | float) and not name.startswith("_")
    }
