"""The plans of one rank: made once for each algorithm, dtype and length, when all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from labkit.communicator.algorithms import schedule_for
from labkit.communicator.board import Mismatch
from labkit.communicator.plan import Plan, plan
from labkit.network import Network
from labkit.schedules import ALLREDUCE, Round


class Plans:
    """Compiled schedules and the tags of their messages.

    Args:
        rank, size: this rank, and how many there are.
        network: on which schedules are laid out, or None for the real hosts.
        allgather: everybody's value, by rank; what for.
        own_host: the ranks of this rank's host.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        network: Network | None,
        allgather: Callable[[Any, str], list[Any]],
        own_host: tuple[int, ...],
    ) -> None:
        self._rank, self._size, self._network = rank, size, network
        self._allgather, self._own_host = allgather, own_host
        self._plans: dict[tuple[str, str, int], tuple[int, Plan]] = {}
        self._rounds: dict[str, list[Round]] = {}

    def get(self, algorithm: str, buffer: np.ndarray) -> tuple[int, Plan]:
        """Tag and plan for a flat buffer; no steps where the library does the work.

        Raises:
            Mismatch: ranks differ in algorithm, dtype or length.
        """
        key = (algorithm, buffer.dtype.str, buffer.size)
        if key not in self._plans:
            told = self._allgather(key, "the agreement on an allreduce")
            if len(set(told)) > 1:
                names = [f"rank {r}: {a} of {d}[{n}]" for r, (a, d, n) in enumerate(told)]
                raise Mismatch(f"ranks differ in an allreduce: {'; '.join(names)}")
            steps = Plan((), 0)
            if algorithm in ALLREDUCE:
                steps = plan(self.rounds(algorithm), self._rank, buffer.size)
            self._plans[key] = (len(self._plans) + 1, steps)
        return self._plans[key]

    def rounds(self, algorithm: str) -> list[Round]:
        """All rounds of a schedule."""
        if algorithm not in self._rounds:
            schedule = schedule_for(algorithm, self._network, self._hosts)
            self._rounds[algorithm] = list(schedule(self._size))
        return self._rounds[algorithm]

    def _hosts(self) -> list[list[int]]:
        """The ranks of each real host."""
        hosts = set(self._allgather(self._own_host, "the hosts of the ranks"))
        return [list(ranks) for ranks in sorted(hosts)]
