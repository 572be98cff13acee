"""How buffers become their sum: by the library, in shared memory, or by a compiled schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.communicator.algorithms import (
    check_algorithm,
    refuse_apart,
    refuse_unmetered,
    schedule_for,
)
from labkit.communicator.emulation import Emulation
from labkit.communicator.executor import Executor
from labkit.communicator.numbers import check_summable, is_narrow, scale
from labkit.communicator.rank_plan import Plan, plan
from labkit.communicator.shared_memory import Aside, SharedMemory
from labkit.communicator.status_board import Mismatch
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import Rules, Wire
from labkit.schedules import ALLREDUCE, Round, boundaries

Reduce: TypeAlias = Callable[..., None]  # of a flat buffer in place; what weighs it stands behind
Key: TypeAlias = tuple[str, str, int]  # algorithm, dtype and length


def library_sum(patience: WaitPolicy, flat: np.ndarray, share: float = 1.0) -> None:
    """Sum in place, by whatever the library chooses; 16-bit floats by way of float32.

    The library does not say what it sent: the least that any allreduce must send per rank
    (Patarasuk & Yuan 2009) stands for it.
    """
    from mpi4py import MPI

    # All meet first, polling, where a missing rank is noticed; behind that everyone is there, and
    # MPI's blocking collective runs at full speed.
    patience.gather_here()
    comm = patience.comm
    narrow = is_narrow(flat.dtype)
    wide = flat.astype(np.float32) if narrow else flat
    if share != 1.0:
        scale(wide, share)
    patience.call("Allreduce", MPI.IN_PLACE, wide)
    if narrow:
        flat[...] = wide.astype(flat.dtype)
    # Out of a host goes at least the sum of its ranks.
    least = 2 * (comm.size - 1) * flat.nbytes // comm.size
    patience.count(least, flat.nbytes // len(patience.board.ranks))


class Reductions:
    """How this rank sums each kind of buffer, once all ranks have agreed on it.

    Args:
        patience: how this rank waits; its meter counts what is summed.
        emulation: the network on which schedules are laid out, or None for the real hosts.
        memory: of the ranks of this host.
        allgather: everybody's value, by rank; what for.
        rules: what holds for all messages of schedules.
    """

    def __init__(
        self,
        patience: WaitPolicy,
        emulation: Emulation | None,
        memory: SharedMemory,
        allgather: Callable[[Any, str], list[Any]],
        rules: Rules | None = None,
    ) -> None:
        self._patience, self._allgather, self.rules = patience, allgather, rules
        self._network = emulation.network if emulation else None
        self._traffic, self._clock = patience.traffic, patience.clock
        self._memory = memory
        ways = (patience.count_to, patience.complete, patience.sleep_until, emulation)
        self._executor = Executor(Wire(patience.comm, rules, patience), *ways)
        self._others: dict[str, Reduce] = {  # by the name of what is no schedule
            "mpi": partial(library_sum, patience),
            "shared_memory": memory.allreduce,
        }
        self._agreed: dict[Key, Reduce] = {}
        self._rounds: dict[str, list[Round]] = {}

    def allreduce(
        self, buffer: np.ndarray, algorithm: str, what: str, *weighing: float | Aside | None
    ) -> None:
        """Sum in place, see `Communicator`.

        Args:
            weighing: for a mean, the factor of this rank's values, at most 1; in shared memory its
                weight, and what lies aside.
        """
        check_algorithm(algorithm)
        check_summable(buffer.dtype, mean=bool(weighing))
        if self._patience.size == 1:
            return
        flat = buffer.reshape(-1)
        if not buffer.flags.c_contiguous:
            raise InvalidInput("allreduce works in place: give a contiguous array")
        kind = "mean of" if weighing else "of"
        place = f"{what} ({algorithm} {kind} {flat.dtype.name}[{flat.size}])"
        reduce = self._get(algorithm, flat, place)
        with self.metered(place, flat.nbytes, algorithm):
            reduce(flat, *weighing)

    def in_rounds(self, buffer: np.ndarray, algorithm: str) -> dict[int, np.ndarray]:
        """Sum in place by a schedule; what the buffer was after each round of this rank."""
        seen: dict[int, np.ndarray] = {}
        self._executor.watch = lambda number, values: seen.update({number: values.copy()})
        try:
            self.allreduce(buffer, algorithm, "a sum that is looked at")
        finally:
            self._executor.watch = None
        return seen

    @contextmanager
    def metered(self, place: str, nbytes: int, algorithm: str) -> Iterator[None]:
        """A collective over data: named, counted, timed without its waits."""
        check_algorithm(algorithm)
        refuse_unmetered(algorithm, self._network)
        self._patience.enter(place)
        self._traffic.payload_bytes += nbytes
        before, start = self._traffic.wait_seconds, self._clock.now()
        with self._patience.minding:
            yield
        self._patience.board.enter(f"work after {place}")
        waited = self._traffic.wait_seconds - before
        self._traffic.transfer_seconds += self._clock.now() - start - waited

    def rounds(self, algorithm: str) -> list[Round]:
        """All rounds of a schedule."""
        if algorithm not in self._rounds:
            schedule = schedule_for(algorithm, self._network, self._hosts)
            self._rounds[algorithm] = list(schedule(self._patience.size))
        return self._rounds[algorithm]

    def _get(self, algorithm: str, buffer: np.ndarray, place: str) -> Reduce:
        """What sums flat buffers like this one.

        Raises:
            Mismatch: ranks differ in algorithm, dtype or length.
        """
        key = (algorithm, buffer.dtype.str, buffer.size)
        if key not in self._agreed:
            self._patience.enter("the agreement on an allreduce", told=f": {place}")
            keys: list[Key] = self._patience.gather(key)
            if len(set(keys)) > 1:
                names = [f"rank {r}: {a} of {d}[{n}]" for r, (a, d, n) in enumerate(keys)]
                raise Mismatch(f"ranks differ in an allreduce: {'; '.join(names)}")
            self._agreed[key] = self._made(algorithm, buffer.size)
        return self._agreed[key]

    def _made(self, algorithm: str, length: int) -> Reduce:
        refuse_apart(algorithm, self._patience.on_one_host)
        if algorithm in self._others:
            return self._others[algorithm]
        between = ALLREDUCE[algorithm].between
        if between is None or self._network or self._patience.on_one_host:
            return self._scheduled(algorithm, length)
        hosts = self._hosts()
        steps = plan(between(self._patience.size, hosts), self._patience.rank, length)
        return self._in_levels(steps, min(map(len, hosts)), length)

    def _scheduled(self, algorithm: str, length: int) -> Reduce:
        steps = plan(self.rounds(algorithm), self._patience.rank, length)

        def run(flat: np.ndarray, share: float = 1.0) -> None:
            if share != 1.0:
                scale(flat, share)
            self._executor.run(steps, flat, self._patience.tag)

        return run

    def _in_levels(self, steps: Plan, parts: int, length: int) -> Reduce:
        """In shared memory inside this host, by the plan of this rank's part between hosts.

        Args:
            parts: of the buffer, one a rank of the host, and none for further ranks.
        """
        edges, local = boundaries(length, parts).tolist(), self._patience.board.local_rank
        part = slice(edges[local], edges[local + 1]) if local < parts else slice(0)

        def run(flat: np.ndarray, share: float = 1.0) -> None:
            if share != 1.0:
                scale(flat, share)
            self._memory.patience.join(self._patience)
            carry = partial(self._executor.run, steps, tag=self._patience.tag)
            self._memory.allreduce_around(flat, part, carry)

        return run

    def _hosts(self) -> list[list[int]]:
        """The ranks of each real host."""
        hosts = set(self._allgather(tuple(self._patience.board.ranks), "the hosts of the ranks"))
        return [list(ranks) for ranks in sorted(hosts)]
