"""Recovery from rank failures: surviving ranks agree on a state, and reset the exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from labkit.common.canonical_json import JSON
from labkit.communicator import RankDied
from labkit.exchange import Exchange
from labkit.exchange.hooks import hooks_of
from labkit.keras import broadcast
from labkit.worker.peer_memory_recovery import RestartTraining

if TYPE_CHECKING:
    from labkit.worker.rank_state import RankState


class Recovery(keras.callbacks.Callback):
    r"""A callback that tracks the current step, so that survivors can go on after a rank failure.

    After a failure, a step counts as taken if any survivor has taken the step. If all survivors
    take over the newest state, the results remain exact. A rank changes its weights only when the
    mean gradients of a step are complete. A mean gradient is complete only when every rank, even
    one that fails later, has sent its gradient. All ranks that take step s have bitwise equal
    weights afterwards, because they apply the same mean gradients. No rank takes step s+1 before
    all others have taken step s. After a failure, each survivor has completed either s or s+1
    steps, because no rank is further ahead. A survivor that has completed the most steps broadcasts
    its state, so no step is applied twice. If no survivor has taken step s, all survivors repeat
    step s with the same global batch \(B_s\). In a repeated step, the survivors divide the rows of
    the batch again, in proportion to their shares. The part of survivor r ends at row \(\lfloor
    |B_s| C_r \rfloor\). The symbol \(C_r\) is the sum of the shares up to r. Every sample is
    trained once per epoch, even after a failure.

    In an epoch with a failure, the metrics lack the rows of failed ranks. The metrics count the
    rows of a repeated step twice. Residuals and layer states of failed ranks are lost.

    Args:
        session: Training session of this rank.
        exchange: Gradient exchange, which is reset after a failure.
        provide_state: Function that provides this rank's state to spare ranks. The function
            receives the fault record and the time of discovery in s.

    Attributes:
        faults: Entries for the run's record, one for each rank failure.
        stretches: Parts of the training, each with a fixed group of ranks. Each entry names ranks
            that trained together, and their first step.
    """

    def __init__(
        self,
        session: RankState,
        exchange: Exchange,
        provide_state: Callable[[dict[str, Any], float], None],
    ) -> None:
        super().__init__()
        self._provide = provide_state
        self._session, self._exchange, self._progress = session, exchange, session.progress
        self._communicator, self._clock = session.communicator, session.communicator.clock
        self._step_start, self._under_way, self._tests = self._clock.now(), False, False
        self._steps_taken = self._progress.taken
        self.faults: list[dict[str, Any]] = []
        self.stretches: list[dict[str, JSON]] = [self._membership()]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record when a step begins, because a recovery may repeat this step."""
        self._step_start, self._under_way = self._clock.now(), True
        if self._exchange.compressed is not None:
            self._exchange.compressed.save_states()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record that a step ended; after a recovery, record the seconds of the first step."""
        self._under_way, self._steps_taken = False, self._progress.taken + 1
        if self.faults and "repeat" not in self.faults[-1]["seconds"]:
            self._record_repeat_seconds(self.faults[-1]["seconds"])

    def on_test_begin(self, logs: Any = None) -> None:
        """Save the metric states of training, because validation overwrites them."""
        self._progress.save_metrics()
        self._tests = True

    def on_test_end(self, logs: Any = None) -> None:
        """Record that validation has ended, and that the metric states belong to training again."""
        self._tests = False

    def recover(self) -> None:
        """Continue training with the surviving ranks (collective over the survivors)."""
        while True:
            try:
                return self._recover()
            except Exception as error:
                died = isinstance(self._communicator.wait_policy.first_error, RankDied)
                if isinstance(error, RestartTraining) or not died:
                    raise

    def _recover(self) -> None:
        noticed_at, before = self._clock.now(), self._communicator.size
        dead = self._communicator.shrink(self._exchange.service.close)
        # If a callback before `progress` noticed the failure, `progress` has not counted the step
        # yet.
        if self._steps_taken > self._progress.taken:
            self._progress.on_train_batch_end(0)
        repeated, ranks_behind = self._agree()
        fault = {
            "ranks": dead,
            "step": self._progress.taken,
            "repeated": repeated,
            "behind": ranks_behind,
        }
        fault["residuals_lost"] = 0 if self._exchange.compressed is None else len(dead)
        if self._communicator.spares:
            self._provide_state(
                fault | {"seconds": {"detect": noticed_at - self._step_start}}, noticed_at
            )
            raise RestartTraining
        agreed = self._clock.now()
        self._exchange.reset(self._communicator.size / before)
        hooks_of(self._session.model).discard_compiled()
        self._session.divide_data()
        self.stretches.append(self._membership())
        seconds = {
            "detect": noticed_at - self._step_start,
            "agree": agreed - noticed_at,
            "rebuild": self._clock.now() - agreed,
        }
        self.faults.append(fault | {"seconds": seconds})
        self._under_way = self._tests = False

    def _provide_state(self, fault: dict[str, Any], noticed_at: float) -> None:
        """Provide this rank's state, so that training can restart with spare ranks."""
        variables, values = self._session.model.metrics_variables, self._progress.metrics
        for variable, value in zip(
            variables, values, strict=False
        ):  # The saved states replace the metric states that validation has overwritten.
            variable.assign(value)
        self._provide(fault, noticed_at)

    def _agree(self) -> tuple[int, int]:
        """Take over the state of a surviving rank that has taken the most steps.

        If several ranks have taken the most steps, a rank that has ended the epoch provides the
        state.

        Returns: The number of steps to repeat (0 or 1). The second result is the number of ranks
            that were behind.
        """
        progress, recorder = self._progress, self._session.recorder
        local_place = (progress.taken, progress.position.epoch)
        places_of_ranks = self._communicator.allgather(
            (local_place, self._under_way), "the training positions of the ranks"
        )
        places = [place for place, _ in places_of_ranks]
        furthest = max(places)
        root = places.index(furthest)
        if (
            local_place[0] == furthest[0]
            and self._under_way
            and self._exchange.compressed is not None
        ):
            self._exchange.compressed.restore_states()
        if not self._tests:
            progress.save_metrics()
        epochs = recorder.epochs if recorder is not None else []
        local_state = (progress.position, progress.taken, epochs)
        progress.position, progress.taken, epochs = self._communicator.broadcast_object(
            local_state, root
        )
        if not progress.position.step:
            progress.metrics = []
        if recorder is not None:
            recorder.epochs[:] = epochs
            recorder.begin = progress.taken - len(recorder.rows)
        self._steps_taken = progress.taken
        if len({steps_taken for steps_taken, _ in places}) > 1:
            broadcast(self._session.state(), self._communicator, root)
        is_repeated = any(
            under_way and place[0] == furthest[0] for place, under_way in places_of_ranks
        )
        return int(is_repeated), sum(place[0] < furthest[0] for place in places)

    def _membership(self) -> dict[str, JSON]:
        return {"step": self._progress.taken, "ranks": list(self._communicator.numbers)}

    def _record_repeat_seconds(self, seconds: dict[str, float]) -> None:
        """Record a step's usual time as "repeat", and the extra time of retracing as "trace"."""
        spent, recorder = self._clock.now() - self._step_start, self._session.recorder
        usual = [row["seconds"] for row in recorder.rows[1:]] if recorder is not None else []
        seconds["repeat"] = min(spent, float(np.median(usual))) if usual else spent
        seconds["trace"] = spent - seconds["repeat"]
        if recorder is not None and self._communicator.rank == 0:
            recorder.report("fault", self.faults[-1:])
