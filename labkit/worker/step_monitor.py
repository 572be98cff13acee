"""A callback that injects faults into training steps and checks the losses of steps."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Injector
from labkit.exchange.gradient import layer_of
from labkit.experiment.fault_injection import sends_every_message
from labkit.worker.recorder import Recorder
from labkit.worker.session import TrainingSession

Sums: TypeAlias = tuple[int, ...]  # A tuple `Sums` holds one checksum per variable.


class ReplicaDriftError(LabkitError):
    """Raised if the weights or optimizer states of replicas differ."""


class ReplicaDriftCheck(keras.callbacks.Callback):
    """Compares the replicas' weights and optimizer states every few steps.

    If the replicas differ, all ranks go back to the last common state. The ranks then repeat all
    steps since the last common state. If a rank gets a different result in the repetition than
    before, this rank was faulty. An error that occurs again in the repetition does not show which
    rank is wrong. If the repetition identifies no rank, a majority of the replicas decides. A
    decision by majority needs three or more ranks. The majority may be wrong, because ranks pass on
    partial sums from faulty ranks.

    Args:
        session: Training session of this rank. This callback must run after all callbacks that
            change weights.
        every: Number of steps between two comparisons.
    """

    def __init__(self, session: TrainingSession, every: int) -> None:
        super().__init__()
        self._session, self._communicator, self._every = session, session.communicator, every
        self._progress, self._step, self._equal_at = session.progress, 0, 0
        self._common_state: list[np.ndarray] = []
        # The list `_marks` holds the checksums after each step since the last comparison of
        # replicas.
        self._marks: list[Sums] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Save the initial state, which is equal on all replicas."""
        self._common_state = self._state()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare replicas every few steps; raise ReplicaDriftError on all ranks if they differ."""
        self._step = self._progress.taken + 1
        self._marks.append(self._quick_sums())
        if self._step % self._every:
            return
        sums_of_ranks = self._gather_sums()
        if len(set(sums_of_ranks)) > 1:
            raise ReplicaDriftError(self._describe(sums_of_ranks))
        self._common_state, self._equal_at, self._marks = self._state(), self._step, []

    def _describe(self, sums_of_ranks: Sequence[Sums]) -> str:
        sums_by_variable = zip(self._compared, zip(*sums_of_ranks, strict=True), strict=True)
        first = next(variable.path for variable, sums in sums_by_variable if len(set(sums)) > 1)
        steps = f"step {self._equal_at}"
        if self._every > 1:
            steps = f"one of the steps {self._equal_at} to {self._step - 1}"
        culprit = self._by_computing_again() or self._by_majority(sums_of_ranks)
        return (
            f"replicas drifted apart in {steps}: layer {layer_of(first)!r} ({first}) is the first "
            f"that differs; {culprit}"
        )

    def _by_majority(self, sums_of_ranks: Sequence[Sums]) -> str:
        (most, count), *_ = Counter(sums_of_ranks).most_common()
        if 2 * count <= len(sums_of_ranks) or len(sums_of_ranks) < 3:
            return "the wrong rank is unknown: neither repeated steps nor a majority identify it"
        wrong = [str(rank) for rank, sums in enumerate(sums_of_ranks) if sums != most]
        return f"rank {', '.join(wrong)} differs from the {count} others, which are equal"

    def _by_computing_again(self) -> str:
        if callable(self._session.experiment.dataset):
            return ""  # A callable dataset may yield other batches when it is read again.
        first_differing = self._communicator.allgather(
            self._first_differing_step(), "the first differing steps"
        )
        first = min(first_differing)
        wrong = [str(rank) for rank, step in enumerate(first_differing) if step == first]
        if len(wrong) == len(first_differing) or len(set(self._gather_sums())) > 1:
            return ""
        return (
            f"rank {', '.join(wrong)} was wrong in step {first}: when the steps are repeated, all "
            "ranks reach the result of the others"
        )

    def _first_differing_step(self) -> int:
        """Return the first step whose repetition gives other weights, or the next step's number.

        All ranks repeat the steps from the last common state.
        """
        self._communicator.rules.injector = None
        for variable, value in zip(self._variables, self._common_state, strict=True):
            variable.assign(value)
        steps = self._step - self._equal_at
        batches = iter(self._session.feed.train.skip(self._equal_at).take(steps))
        first_differing = self._step
        for number, mark in enumerate(self._marks, start=self._equal_at):
            self.model.train_function(batches)
            if mark != self._quick_sums():
                first_differing = min(first_differing, number)
        return first_differing

    def _gather_sums(self) -> list[Sums]:
        local_sums = tuple(zlib.crc32(np.asarray(v.value).tobytes()) for v in self._compared)
        return self._communicator.allgather(local_sums, "the checksums of the weights")

    def _quick_sums(self) -> Sums:
        """Return each variable's bit patterns summed as integers, faster than a checksum."""
        arrays = (np.asarray(variable.value) for variable in self._compared)
        return tuple(int(a.reshape(-1).view(f"u{a.itemsize}").sum()) for a in arrays)

    def _state(self) -> list[np.ndarray]:
        return [np.array(variable.value) for variable in self._variables]

    @property
    def _compared(self) -> list[keras.Variable]:
        """The variables that must be equal on all ranks: weights and optimizer states."""
        return [*self.model.trainable_variables, *self.model.optimizer.variables]

    @property
    def _variables(self) -> list[keras.Variable]:
        return [*self.model.variables, *self.model.optimizer.variables]


def install(session: TrainingSession, recorder: Recorder) -> None:
    """Set up the fault injection and the checks of losses and replicas for an experiment."""
    _inject_faults(session)
    if session.guard is not None:
        session.guard.loss = lambda: recorder.loss
    session.callbacks.append(StepMonitor(session, recorder))
    if session.experiment.replica_check_interval and session.communicator.size > 1:
        session.callbacks.append(
            ReplicaDriftCheck(session, session.experiment.replica_check_interval)
        )


def _inject_faults(session: TrainingSession) -> None:
    experiment, rank = session.experiment, session.communicator.rank
    if not (faults := experiment.faults):
        return
    paths = [variable.path for variable in session.model.trainable_variables]
    for fault in faults:
        if not any(fault.names(path) for path in paths):
            layers = ", ".join(dict.fromkeys(map(layer_of, paths)))
            raise InvalidInput(
                f"{fault!r}: no layer {fault.layer!r} is trained; trained layers: {layers}"
            )
    arguments = experiment.seed, sends_every_message(experiment)
    if experiment.clock == "virtual":
        ranks = {fault.rank for fault in faults}
        session.injectors = {w: Injector(faults, w, *arguments, real=False) for w in ranks}
        return
    session.injectors = {rank: Injector(faults, rank, *arguments)}
    session.communicator.inject_faults(session.injectors[rank])


class StepMonitor(keras.callbacks.Callback):
    """A callback that tells the fault injector and the NaN check each training step's number.

    A loss may be NaN or infinite although all gradients are finite. After a step, the callback also
    reports a NaN or infinite loss.
    """

    def __init__(self, session: TrainingSession, recorder: Recorder) -> None:
        super().__init__()
        self._guard, self._recorder = session.guard, recorder
        self._injector = session.injectors.get(session.communicator.rank)
        # With mixed_float16, the scaled loss may overflow; this is normal, and Keras handles it.
        self._looks = session.experiment.precision != "mixed_float16"
        self._known = False  # The attribute `_known` is true once the rank has had a finite loss.
        self._progress, self._step = session.progress, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Tell the NaN check and the fault injector that a training step begins."""
        self._step = self._progress.taken
        if self._guard is not None:
            self._guard.step = self._step
        if self._injector is not None:
            self._injector.begin_step(self._step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check the loss of this rank's rows, unless this rank has no rows in the step."""
        row = self._recorder.rows[-1]
        is_finite, guard = math.isfinite(row["loss"]), self._guard
        is_bad = self._known and not is_finite and row["samples"] and self._looks
        self._known = self._known or is_finite
        if (
            guard is not None
            and is_bad
            and all(event["step"] < self._step for event in guard.records)
        ):
            guard.record("", 1)
