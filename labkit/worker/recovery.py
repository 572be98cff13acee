"""Training that outlives ranks: what those that live agree on, and what they make anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from labkit.common.canonical_json import JSON
from labkit.communicator import RankDied
from labkit.exchange import Exchange
from labkit.exchange.hooks import seam
from labkit.keras import broadcast
from labkit.worker.peer_memory_recovery import RestartTraining

if TYPE_CHECKING:
    from labkit.worker.session import TrainingSession


class Recovery(keras.callbacks.Callback):
    r"""Knows between which steps this rank stands, and goes on from there when others are gone.

    A step is taken when any rank that lives has taken it. That is exact. A rank changes its weights
    only when all means of the step are there, all at once, and a mean is there only when every
    rank, the dead too, has given its gradients of that step. So who has taken step s has what all
    would have, to the bit, and no rank can have taken s+1 where another has not taken s. Those that
    live stand at s or s+1; the state of one that is furthest is given to all, and nothing is taken
    twice. Where nobody has taken it, the step is begun again, by those that live: it has the same
    global batch \(B_s\), whose rows \(\lfloor |B_s| C_r \rfloor\) on are cut anew by the shares of
    those that live, so that every sample comes once an epoch.

    What is lost: metrics of this epoch miss the rows of the dead, and count those of a step twice
    that was begun again; residuals of the dead; what layers keep of their own rows.

    Args:
        session: of this rank.
        exchange: of the gradients.

    Attributes:
        faults: for the record, one for each time that ranks were gone.
        stretches: from which step on which ranks trained.
    """

    def __init__(self, session: TrainingSession, exchange: Exchange) -> None:
        super().__init__()
        self._session, self._exchange, self._progress = session, exchange, session.progress
        self._communicator, self._clock = session.communicator, session.communicator.clock
        self._begun, self._under_way, self._tests = self._clock.now(), False, False
        self._taken = self._progress.taken
        self.faults: list[dict[str, Any]] = []
        self.stretches: list[dict[str, JSON]] = [self._stretch()]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step begins, which may be taken back."""
        self._begun, self._under_way = self._clock.now(), True
        if self._exchange.compressed is not None:
            self._exchange.compressed.mark()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The step is taken; the first one after a recovery is a part of what that has cost."""
        self._under_way, self._taken = False, self._progress.taken + 1
        if self.faults and "repeat" not in self.faults[-1]["seconds"]:
            self._say_what_the_step_took(self.faults[-1]["seconds"])

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation uses the metrics, too."""
        self._progress.hold()
        self._tests = True

    def on_test_end(self, logs: Any = None) -> None:
        """From here on they are those of training again."""
        self._tests = False

    def recover(self) -> None:
        """Go on as the ranks that live (collective of these)."""
        while True:
            try:
                return self._recover()
            except Exception as error:
                died = isinstance(self._communicator.patience.trouble, RankDied)
                if isinstance(error, RestartTraining) or not died:
                    raise

    def _recover(self) -> None:
        noticed, before = self._clock.now(), self._communicator.size
        dead = self._communicator.shrink(self._exchange.service.close)
        if self._taken > self._progress.taken:  # a callback has met the death
            self._progress.on_train_batch_end(0)
        repeated, lost = self._agree()
        told = {"ranks": dead, "step": self._progress.taken, "repeated": repeated, "behind": lost}
        told["residuals_lost"] = 0 if self._exchange.compressed is None else len(dead)
        if self._communicator.spares:
            self._offer(told | {"seconds": {"detect": noticed - self._begun}}, noticed)
            raise RestartTraining
        agreed = self._clock.now()
        self._exchange.reset(self._communicator.size / before)
        seam(self._session.model).forget()
        self._session.read_anew()
        self.stretches.append(self._stretch())
        seconds = {
            "detect": noticed - self._begun,
            "agree": agreed - noticed,
            "rebuild": self._clock.now() - agreed,
        }
        self.faults.append(told | {"seconds": seconds})
        self._under_way = self._tests = False

    def _offer(self, told: dict[str, Any], noticed: float) -> None:
        """Have the state ready for spares, and for those that live."""
        own, held = self._session.model.metrics_variables, self._progress.metrics
        for variable, value in zip(own, held, strict=False):  # what tests have put in their place
            variable.assign(value)
        assert self._session.comeback is not None
        self._session.comeback.offer(self._session.keeper(), told, noticed)

    def _agree(self) -> tuple[int, int]:
        """Stand where the furthest stands; steps that are begun again, and ranks that were behind.

        Of two that have taken as many steps, the one is further that has ended the epoch.
        """
        progress, recorder = self._progress, self._session.recorder
        own = (progress.taken, progress.position.epoch)
        everyone = self._communicator.allgather((own, self._under_way), "where all stand")
        places = [place for place, _ in everyone]
        furthest = max(places)
        root = places.index(furthest)
        if own[0] == furthest[0] and self._under_way and self._exchange.compressed is not None:
            self._exchange.compressed.take_back()
        if not self._tests:
            progress.hold()
        epochs = recorder.epochs if recorder is not None else []
        told = (progress.position, progress.taken, epochs)
        progress.position, progress.taken, epochs = self._communicator.share(told, root)
        if not progress.position.step:
            progress.metrics = []
        if recorder is not None:
            recorder.epochs[:] = epochs
            recorder.begin = progress.taken - len(recorder.rows)
        self._taken = progress.taken
        if len({taken for taken, _ in places}) > 1:
            broadcast(self._session.state(), self._communicator, root)
        again = any(under_way and place[0] == furthest[0] for place, under_way in everyone)
        return int(again), sum(place[0] < furthest[0] for place in places)

    def _stretch(self) -> dict[str, JSON]:
        return {"step": self._progress.taken, "ranks": list(self._communicator.numbers)}

    def _say_what_the_step_took(self, seconds: dict[str, float]) -> None:
        """A usual step's time, and what went beyond it: all is traced anew."""
        spent, recorder = self._clock.now() - self._begun, self._session.recorder
        usual = [row["seconds"] for row in recorder.rows[1:]] if recorder is not None else []
        seconds["repeat"] = min(spent, float(np.median(usual))) if usual else spent
        seconds["trace"] = spent - seconds["repeat"]
        if recorder is not None and self._communicator.rank == 0:
            recorder.report("fault", self.faults[-1:])
