"""Replicas that drift apart: noticed by checksums of their weights, and traced to who is wrong."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from labkit.common.errors import LabkitError
from labkit.exchange.guard import layer_of
from labkit.worker.session import TrainingSession

Sums: TypeAlias = tuple[int, ...]  # a checksum of each variable


class Drifted(LabkitError):
    """Replicas that should be equal are not."""


class Drift(keras.callbacks.Callback):
    """Compares the replicas' weights and optimizer states every few steps.

    Where they differ, all compute the steps since the last comparison again, from the state that
    was equal then: who arrives elsewhere than before was wrong. Where that does not tell, as with
    an error that repeats itself, the majority of three or more does: ranks that hand on what they
    were given may be wrong together.

    Args:
        session: of this rank; comes behind all else that changes weights.
        every: steps from one comparison to the next.
    """

    def __init__(self, session: TrainingSession, every: int) -> None:
        super().__init__()
        self._session, self._communicator, self._every = session, session.communicator, every
        self._progress, self._step, self._equal_at = session.progress, 0, 0
        self._kept: list[np.ndarray] = []
        self._marks: list[Sums] = []  # after each step since then

    def on_train_begin(self, logs: Any = None) -> None:
        """All begin with the same."""
        self._kept = self._state()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare, if it is time. Raises: Drifted, on all ranks."""
        self._step = self._progress.taken + 1
        self._marks.append(self._marked())
        if self._step % self._every:
            return
        told = self._gathered()
        if len(set(told)) > 1:
            raise Drifted(self._told(told))
        self._kept, self._equal_at, self._marks = self._state(), self._step, []

    def _told(self, told: Sequence[Sums]) -> str:
        each = zip(self._compared, zip(*told, strict=True), strict=True)
        first = next(variable.path for variable, sums in each if len(set(sums)) > 1)
        steps = f"step {self._equal_at}"
        if self._every > 1:
            steps = f"one of the steps {self._equal_at} to {self._step - 1}"
        who = self._by_computing_again() or self._by_majority(told)
        return (
            f"replicas drifted apart in {steps}: layer {layer_of(first)!r} ({first}) is the first "
            f"that differs; {who}"
        )

    def _by_majority(self, told: Sequence[Sums]) -> str:
        (most, count), *_ = Counter(told).most_common()
        if 2 * count <= len(told) or len(told) < 3:
            return "who is wrong is not known: computing again does not tell, nor a majority"
        wrong = [str(rank) for rank, sums in enumerate(told) if sums != most]
        return f"rank {', '.join(wrong)} differs from the {count} others, which are equal"

    def _by_computing_again(self) -> str:
        if callable(self._session.experiment.dataset):
            return ""  # which may give no batch twice
        left = self._communicator.allgather(self._left(), "who has left the way")
        first = min(left)
        wrong = [str(rank) for rank, step in enumerate(left) if step == first]
        if len(wrong) == len(left) or len(set(self._gathered())) > 1:
            return ""
        return (
            f"rank {', '.join(wrong)} went wrong in step {first}: computed again, all arrive where "
            "the others were"
        )

    def _left(self) -> int:
        """The first step that gives other weights when it is computed again; that after the last.

        All begin with the last state that was equal.
        """
        self._communicator.rules.injector = None
        for variable, value in zip(self._variables, self._kept, strict=True):
            variable.assign(value)
        steps = self._step - self._equal_at
        batches = iter(self._session.feed.train.skip(self._equal_at).take(steps))
        left = self._step
        for number, mark in enumerate(self._marks, start=self._equal_at):
            self.model.train_function(batches)
            if mark != self._marked():
                left = min(left, number)
        return left

    def _gathered(self) -> list[Sums]:
        own = tuple(zlib.crc32(np.asarray(v.value).tobytes()) for v in self._compared)
        return self._communicator.allgather(own, "the checksums of the weights")

    def _marked(self) -> Sums:
        """What differs where a bit does, in less time than a checksum takes."""
        arrays = (np.asarray(variable.value) for variable in self._compared)
        return tuple(int(a.reshape(-1).view(f"u{a.itemsize}").sum()) for a in arrays)

    def _state(self) -> list[np.ndarray]:
        return [np.array(variable.value) for variable in self._variables]

    @property
    def _compared(self) -> list[keras.Variable]:
        """What is equal on all ranks: not what layers keep of their own rows."""
        return [*self.model.trainable_variables, *self.model.optimizer.variables]

    @property
    def _variables(self) -> list[keras.Variable]:
        return [*self.model.variables, *self.model.optimizer.variables]
