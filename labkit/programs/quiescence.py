"""All ranks stand still at one moment at which nothing is on its way between them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from labkit.communicator import Communicator

_MET, _SENT, _GOT, _STEPS, _OVER = range(5)


class Quiescence:
    r"""A consistent cut through programs that several ranks play, found by counting.

    Rank 0 asks; each rank stands still before its next action, and goes on taking in what comes.
    All stand still with nothing on its way when all have been in as many allreduces, and as many
    letters have come as were sent: \(\sum_r s_r = \sum_r g_r\). Whoever sees that another one is in
    an allreduce goes on until it has come there, too. From then on nobody moves before all have
    seen it, for which they meet.

    Args:
        communicator: the ranks; what they have counted on its board is of one play.

    Attributes:
        steps: that this rank has behind it.

    Source: F. Mattern, Efficient algorithms for distributed snapshots and global virtual time
    approximation, 1993 (counting messages), doi 10.1006/jpdc.1993.1075; K. M. Chandy, L. Lamport,
    Distributed snapshots, 1985, doi 10.1145/214451.214456. Differs from both: ranks stand still
    meanwhile, and messages that had been on their way are a part of their readers' states.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._board = communicator, communicator.board
        self._time, self._asked = 1, False
        self.steps = self._met = self._sent = self._got = self._over = 0

    @property
    def steps_of_all(self) -> int:
        """That all ranks have behind them, as far as this one knows."""
        return int(self._board.counts()[:, _STEPS].sum())

    def count(self, steps: int = 0, met: int = 0, sent: int = 0, got: int = 0) -> None:
        """So many more steps, allreduces that begin, letters; others may see it."""
        self.steps, self._met = self.steps + steps, self._met + met
        self._sent, self._got = self._sent + sent, self._got + got
        self._board.count(self._met, self._sent, self._got, self.steps, self._over)

    def ask(self) -> None:
        """On rank 0: all are to stand still."""
        if not self._asked:
            self._asked = True
            self._board.request_checkpoint(self._time)

    @property
    def wanted(self) -> bool:
        """Whether this rank is to stand still now."""
        return self._board.asked_to_keep(self._time) and not self._behind()

    def comes(self, look: Callable[[], object]) -> int | None:
        """Stand still until all do (collective).

        Args:
            look: takes in what has come.

        Returns:
            the steps that all have behind them; None: this rank has to go on before.
        """
        patience = self._communicator.patience
        patience.enter("a checkpoint of programs", collective=False)
        patience.begin()
        self._board.set_quiescent(self._time)
        told, polls = None, 0
        while told is None:
            if self._behind():
                self._board.set_quiescent(0)
                return None
            look()
            if self._board.all_stand_still(self._time) and self._agreed(self._board.counts()):
                own = self._met, self._sent, self._got, self.steps, self._over
                told = np.array(self._communicator.allgather(own, "a checkpoint of programs"))
                told = told if self._agreed(told) else None  # rows may have been half written
            patience.pause(polls)
            polls += 1
        self._time, self._asked = self._time + 1, False
        return int(told[:, _STEPS].sum())

    def ended(self) -> bool:
        """Whether all ranks have come to their ends, as this one has; until then they may be asked.

        Rank 0 says so last, and asks for nothing then.
        """
        counts = self._board.counts()
        self._over = int(self._communicator.rank != 0 or counts[1:, _OVER].all())
        self.count()
        return bool(counts[0, _OVER])

    def _behind(self) -> bool:
        return bool((self._board.counts()[:, _MET] > self._met).any())

    @staticmethod
    def _agreed(counts: np.ndarray) -> bool:
        met, sent, got, *_ = counts.T
        return bool((met == met[0]).all() and sent.sum() == got.sum())
