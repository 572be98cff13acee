"""What stands by a training from step to step: faults begin, losses are looked at."""

from __future__ import annotations

import math
from typing import Any

import keras

from labkit.common.errors import InvalidInput
from labkit.communicator import Injector
from labkit.exchange.guard import layer_of
from labkit.experiment.fault_injection import sends
from labkit.worker.recorder import Recorder
from labkit.worker.replica_drift import Drift
from labkit.worker.session import TrainingSession


def keep(session: TrainingSession, recorder: Recorder) -> None:
    """Let faults happen, look at losses, compare replicas, as the experiment asks."""
    _plant(session)
    if session.guard is not None:
        session.guard.loss = lambda: recorder.loss
    session.callbacks.append(StepMonitor(session, recorder))
    if session.experiment.check_every and session.communicator.size > 1:
        session.callbacks.append(Drift(session, session.experiment.check_every))


def _plant(session: TrainingSession) -> None:
    experiment, rank = session.experiment, session.communicator.rank
    if not (faults := experiment.faults):
        return
    paths = [variable.path for variable in session.model.trainable_variables]
    for fault in faults:
        if not any(fault.names(path) for path in paths):
            layers = ", ".join(dict.fromkeys(map(layer_of, paths)))
            raise InvalidInput(
                f"{fault!r}: no layer {fault.layer!r} is trained; there are {layers}"
            )
    given = experiment.seed, sends(experiment)
    if experiment.clock == "virtual":
        who = {fault.rank for fault in faults}
        session.injectors = {w: Injector(faults, w, *given, real=False) for w in who}
        return
    session.injectors = {rank: Injector(faults, rank, *given)}
    session.communicator.plant(session.injectors[rank])


class StepMonitor(keras.callbacks.Callback):
    """Tells those who plant faults, and those who look for them, which step it is.

    A loss that is bad while gradients are not is noticed at the end of its step.
    """

    def __init__(self, session: TrainingSession, recorder: Recorder) -> None:
        super().__init__()
        self._guard, self._recorder = session.guard, recorder
        self._injector = session.injectors.get(session.communicator.rank)
        # A scaled loss overflows now and then, and is taken care of.
        self._looks = session.experiment.precision != "mixed_float16"
        self._known = False  # whether this rank knows its losses
        self._progress, self._step = session.progress, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step begins."""
        self._step = self._progress.taken
        if self._guard is not None:
            self._guard.step = self._step
        if self._injector is not None:
            self._injector.begins(self._step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Look at the loss of this rank's rows, if it has some."""
        row = self._recorder.rows[-1]
        fine, guard = math.isfinite(row["loss"]), self._guard
        bad = self._known and not fine and row["samples"] and self._looks
        self._known = self._known or fine
        if guard is not None and bad and all(each["step"] < self._step for each in guard.found):
            guard.note("", 1)
