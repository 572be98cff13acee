"""The artificial slowdown of a rank's computation."""

from __future__ import annotations

from labkit.communicator.clock import Clock
from labkit.network import Slowdown
from labkit.network.compute_time import uniform


class Slowness:
    """The slowdown of one rank, with a random factor for each computation.

    Args:
        slow: The settings of the artificial slowdown of the rank's computations.
        rank: The number of the rank among all ranks, which selects the stream of random factors.
        seed: The seed of the random factors.
        clock: The clock of the rank. The times of pauses are measured from the construction of this
            object.
    """

    def __init__(self, slow: Slowdown, rank: int, seed: int, clock: Clock) -> None:
        self._slow, self._rank, self._seed, self._clock = slow, rank, seed, clock
        self._computations, self._origin = 0, clock.now()

    def act(self, computed: float) -> None:
        """Sleep after a computation for the extra time that the slow rank would have needed.

        Args:
            computed: The real seconds that the computation took.
        """
        number = float(uniform(self._seed, self._rank, self._computations)[0])
        self._computations += 1
        stop = self._clock.now() - self._origin
        start = stop - computed
        longer = start + self._slow.factor(number) * computed
        self._clock.sleep(self._slow.resumes(start, longer) - stop)
