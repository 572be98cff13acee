"""Quiescence: all ranks pause, with no message in transit, so that a checkpoint can be saved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from labkit.communicator import Communicator

_MET, _SENT, _GOT, _STEPS, _OVER = range(5)


class Quiescence:
    r"""A protocol that stops all ranks in a consistent state, which message counts detect.

    First, rank 0 requests a checkpoint from all ranks. Each rank then pauses before its next
    action, but continues to receive messages. The ranks are quiescent when their counts of
    allreduces are equal and no messages are in transit. Equal counts of allreduces mean that all
    ranks have started the same number of allreduces. Rank r has sent \(s_r\) messages and received
    \(g_r\) messages. Equal totals of sent and received messages mean that no message is in transit.
    A paused rank continues if another rank waits for this rank in an allreduce. Finally, all ranks
    compare their counts of allreduces and messages in a collective call, before any rank resumes.

    Args:
        communicator: Communicator of the ranks. The communicator's status table, in shared memory,
            can store the counts of only one run.

    Attributes:
        steps: Number of training steps that this rank has completed.

    References: F. Mattern, Efficient algorithms for distributed snapshots and global virtual time
    approximation, 1993 (counting messages), doi 10.1006/jpdc.1993.1075; K. M. Chandy, L. Lamport,
    Distributed snapshots, 1985, doi 10.1145/214451.214456. Difference from both references: ranks
    pause during the snapshot, and each message in transit is received and saved with its receiver's
    state.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator, self._board = communicator, communicator.board
        self._time, self._asked = 1, False
        self.steps = self._met = self._sent = self._got = self._over = 0

    @property
    def steps_of_all(self) -> int:
        """The number of training steps that all ranks together have completed."""
        return int(self._board.counts()[:, _STEPS].sum())

    def count(self, steps: int = 0, allreduces: int = 0, sent: int = 0, got: int = 0) -> None:
        """Increase this rank's counts of steps, allreduces, sent messages and received messages."""
        self.steps, self._met = self.steps + steps, self._met + allreduces
        self._sent, self._got = self._sent + sent, self._got + got
        self._board.count(self._met, self._sent, self._got, self.steps, self._over)

    def ask(self) -> None:
        """Request a checkpoint from all ranks; only rank 0 may call this method."""
        if not self._asked:
            self._asked = True
            self._board.request_checkpoint(self._time)

    @property
    def wanted(self) -> bool:
        """Whether this rank must pause now, because a checkpoint is requested."""
        return self._board.is_checkpoint_requested(self._time) and not self._behind()

    def wait(self, look: Callable[[], object]) -> int | None:
        """Pause until all ranks are quiescent (collective).

        Args:
            look: Function that receives this rank's pending messages.

        Returns:
            Total number of completed steps of all ranks, or None if this rank must continue first.
        """
        patience = self._communicator.wait_policy
        patience.name_call("a checkpoint of programs", collective=False)
        patience.start_wait()
        self._board.set_quiescent(self._time)
        counts, polls = None, 0
        while counts is None:
            if self._behind():
                self._board.set_quiescent(0)
                return None
            look()
            if self._board.all_quiescent(self._time) and self._agreed(self._board.counts()):
                own_counts = self._met, self._sent, self._got, self.steps, self._over
                counts = np.array(
                    self._communicator.allgather(own_counts, "a checkpoint of programs")
                )
                # A rank may read a half-written row of the status table. The ranks therefore
                # exchange and compare the counts again.
                counts = counts if self._agreed(counts) else None
            patience.pause(polls)
            polls += 1
        self._time, self._asked = self._time + 1, False
        return int(counts[:, _STEPS].sum())

    def all_ended(self) -> bool:
        """Return whether all ranks have ended, so that nobody can request another checkpoint.

        Rank 0 ends after all other ranks, and requests no checkpoint after its end.
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
