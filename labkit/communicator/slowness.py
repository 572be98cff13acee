"""A rank that computes more slowly than it could, because an experiment says so."""

from __future__ import annotations

from labkit.communicator.clock import Clock
from labkit.network import Slowdown
from labkit.network.random_streams import uniform


class Slowness:
    """How much longer one rank computes; it draws a factor for each of its computations.

    Args:
        slow: how slow it is.
        rank: its number among all ranks.
        seed: of what is drawn.
        clock: of the rank; a pause is told from now on.
    """

    def __init__(self, slow: Slowdown, rank: int, seed: int, clock: Clock) -> None:
        self._slow, self._rank, self._seed, self._clock = slow, rank, seed, clock
        self._computations, self._origin = 0, clock.now()

    def act(self, computed: float) -> None:
        """Sleep as much longer as the slow rank would compute, behind so many real seconds."""
        number = float(uniform(self._seed, self._rank, self._computations)[0])
        self._computations += 1
        stop = self._clock.now() - self._origin
        start = stop - computed
        longer = start + self._slow.factor(number) * computed
        self._clock.sleep(self._slow.resumes(start, longer) - stop)
