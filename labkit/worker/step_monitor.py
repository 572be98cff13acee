"""A callback that injects faults into training steps and checks the losses of steps."""

from __future__ import annotations

import math
from typing import Any

import keras

from labkit.common.errors import InvalidInput
from labkit.communicator import Injector
from labkit.exchange.gradient import layer_of
from labkit.experiment.fault_injection import sends_every_message
from labkit.worker.recorder import Recorder
from labkit.worker.replica_drift import ReplicaDriftCheck
from labkit.worker.session import TrainingSession


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
    """A callback that tells the fault injector and the guard the number of each training step.

    After a step, the callback also reports a loss that is NaN or infinite although all gradients
    were finite.
    """

    def __init__(self, session: TrainingSession, recorder: Recorder) -> None:
        super().__init__()
        self._guard, self._recorder = session.guard, recorder
        self._injector = session.injectors.get(session.communicator.rank)
        # With mixed_float16, the scaled loss may overflow; this is normal, and Keras handles it.
        self._looks = session.experiment.precision != "mixed_float16"
        self._known = False  # whether this rank has had a finite loss so far
        self._progress, self._step = session.progress, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Tell the guard and the fault injector that a training step begins."""
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
