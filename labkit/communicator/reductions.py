"""Allreduce by the MPI library, in shared memory, or by a compiled schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.communicator.emulation import Emulation
from labkit.communicator.executor import Executor, RankPlan, plan
from labkit.communicator.shared_memory import SeparateBuffers, SharedMemory
from labkit.communicator.status_board import Mismatch
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import (
    MessageRules,
    MpiWire,
    is_16_bit_float,
    scale,
    validate_summable,
)
from labkit.network import Network
from labkit.schedules import ALLREDUCE, IN_NETWORK, Round, Schedule, boundaries

# The algorithms in `UNMETERED` transfer data without labkit's own messages, so labkit's emulated
# network cannot delay the data. An emulated network can delay only messages that labkit itself
# sends.
UNMETERED = {
    "mpi": "the MPI library sends the messages, so labkit cannot delay them",
    "shared_memory": "ranks read each other's memory and send no messages that labkit could delay",
}
ALGORITHMS = (*UNMETERED, *ALLREDUCE)


def validate_algorithm(algorithm: str) -> None:
    """Raise InvalidInput if the algorithm is unknown; the message lists all allowed names."""
    if algorithm in IN_NETWORK:
        raise InvalidInput(
            f"algorithm={algorithm!r} sums inside network switches and runs only in the "
            f"simulator (labkit simulate {algorithm}); allowed on ranks: {', '.join(ALGORITHMS)}"
        )
    refuse_unknown("algorithm", [algorithm], ALGORITHMS)


def refuse_unmetered(algorithm: str, network: object) -> None:
    """Raise an error if the algorithm cannot run on the emulated network.

    An emulated network can only delay messages that labkit itself sends.

    Raises:
        InvalidInput: The algorithm cannot run on an emulated network; the message names
            alternatives.
    """
    if network is not None and algorithm in UNMETERED:
        raise InvalidInput(
            f"algorithm={algorithm!r} cannot run on the emulated network {str(network)!r}: "
            f"{UNMETERED[algorithm]}; give one of the algorithms {', '.join(ALLREDUCE)}, or "
            "network=None"
        )


def validate_one_host(algorithm: str, on_one_host: bool) -> None:
    """Raise an error if "shared_memory" is chosen and the ranks are not all on one host.

    Raises:
        InvalidInput: The ranks run on several hosts; the message names alternatives.
    """
    if algorithm == "shared_memory" and not on_one_host:
        raise InvalidInput(
            "algorithm='shared_memory' requires all ranks on one host; use 'two_level', which "
            "sums in shared memory inside each host, or 'auto'"
        )


def schedule_for(
    algorithm: str, network: Network | None, hosts: Callable[[], list[list[int]]]
) -> Schedule:
    """Return the schedule of an allreduce algorithm for an emulated network or the real hosts.

    Args:
        algorithm: The name of an allreduce algorithm in `labkit.schedules.ALLREDUCE`.
        network: The emulated network; None: the real network.
        hosts: A function that returns, for each real host, the list of its ranks.
    """
    if network is not None:
        return network.schedule(algorithm)
    schedule = ALLREDUCE[algorithm]
    return partial(schedule, hosts=hosts()) if schedule.layout == "hosts" else schedule


# A `Reduce` function takes a flat buffer and weights, and sums the buffer over all ranks in place.
Reduce: TypeAlias = Callable[..., None]
# The key of a reduction consists of the algorithm, the dtype and the buffer length.
Key: TypeAlias = tuple[str, str, int]


def library_sum(wait_policy: WaitPolicy, flat: np.ndarray, share: float = 1.0) -> None:
    """Sum an array in place over all ranks with the MPI library; add 16-bit floats in float32.

    The MPI library does not report its traffic. The traffic meter counts the minimum bytes that any
    allreduce sends per rank. Patarasuk & Yuan 2009 prove the lower bound of an allreduce's bytes.

    Args:
        wait_policy: The wait policy of this rank.
        flat: The values of this rank, which the sum replaces.
        share: A factor that multiplies this rank's values before the sum; default: 1.
    """
    from mpi4py import MPI

    # Each rank polls while it waits in the barrier before the allreduce, and thus detects a missing
    # rank. After the barrier, all ranks are in the call, so MPI's blocking collective runs at full
    # speed.
    wait_policy.allgather_scalar()
    comm = wait_policy.comm
    narrow = is_16_bit_float(flat.dtype)
    wide = flat.astype(np.float32) if narrow else flat
    if share != 1.0:
        scale(wide, share)
    wait_policy.call("Allreduce", MPI.IN_PLACE, wide)
    if narrow:
        flat[...] = wide.astype(flat.dtype)
    # Each host must send at least one buffer, the sum over its ranks, to other hosts.
    least = 2 * (comm.size - 1) * flat.nbytes // comm.size
    wait_policy.count(least, flat.nbytes // len(wait_policy.board.ranks))


class Reductions:
    """The allreduce algorithms of this rank. Before the first reduction with a new algorithm, dtype
    or length, the ranks compare these arguments.

    Args:
        wait_policy: The wait policy of this rank, with its traffic meter.
        emulation: The emulated network; None: the real network.
        memory: The shared memory of this host's ranks, for the algorithm "shared_memory".
        allgather: A function of (value, name of the call) that returns the values of all ranks.
        rules: The rules for checksums and fault injection in the messages of schedules.
    """

    def __init__(
        self,
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        memory: SharedMemory,
        allgather: Callable[[Any, str], list[Any]],
        rules: MessageRules | None = None,
    ) -> None:
        self._wait_policy, self._allgather, self.rules = wait_policy, allgather, rules
        self._network = emulation.network if emulation else None
        self._traffic, self._clock = wait_policy.traffic, wait_policy.clock
        self._memory = memory
        callbacks = (wait_policy.count_to, wait_policy.wait_all, wait_policy.sleep_until, emulation)
        self._executor = Executor(MpiWire(wait_policy.comm, rules, wait_policy), *callbacks)
        # The dict `_others` contains the allreduce functions of the algorithms that have no
        # communication schedule.
        self._others: dict[str, Reduce] = {
            "mpi": partial(library_sum, wait_policy),
            "shared_memory": memory.allreduce,
        }
        self._agreed: dict[Key, Reduce] = {}
        self._rounds: dict[str, list[Round]] = {}

    def allreduce(
        self,
        buffer: np.ndarray,
        algorithm: str,
        label: str,
        *weighing: float | SeparateBuffers | None,
    ) -> None:
        """Sum the buffers of all ranks in place; see `Communicator.allreduce`.

        Args:
            weighing: Arguments for a weighted mean; omit them for a plain sum of the buffers. For a
                mean, pass the factor of this rank's values, at most 1. With "shared_memory", pass
                this rank's weight and a `SeparateBuffers` object.
        """
        validate_algorithm(algorithm)
        validate_summable(buffer.dtype, mean=bool(weighing))
        if self._wait_policy.size == 1:
            return
        flat = buffer.reshape(-1)
        if not buffer.flags.c_contiguous:
            raise InvalidInput(
                "allreduce changes its array in place and requires contiguous memory: give a "
                "contiguous array"
            )
        kind = "mean of" if weighing else "of"
        name = f"{label} ({algorithm} {kind} {flat.dtype.name}[{flat.size}])"
        reduce = self._get(algorithm, flat, name)
        with self.metered(name, flat.nbytes, algorithm):
            reduce(flat, *weighing)

    def allreduce_in_rounds(self, buffer: np.ndarray, algorithm: str) -> dict[int, np.ndarray]:
        """Sum a buffer in place by message rounds; return a copy of the buffer after each round.

        Returns: A copy of the buffer after each round, by round number from 1.
        """
        snapshots: dict[int, np.ndarray] = {}
        self._executor.watch = lambda number, values: snapshots.update({number: values.copy()})
        try:
            self.allreduce(buffer, algorithm, "an allreduce that records its intermediate values")
        finally:
            self._executor.watch = None
        return snapshots

    @contextmanager
    def metered(self, name: str, nbytes: int, algorithm: str) -> Iterator[None]:
        """Count a collective's traffic and time, without waits, under the given name."""
        validate_algorithm(algorithm)
        refuse_unmetered(algorithm, self._network)
        self._wait_policy.name_call(name)
        self._traffic.payload_bytes += nbytes
        before, start = self._traffic.wait_seconds, self._clock.now()
        with self._wait_policy.failure_guard:
            yield
        self._wait_policy.board.enter(f"work after {name}")
        waited = self._traffic.wait_seconds - before
        self._traffic.transfer_seconds += self._clock.now() - start - waited

    def rounds(self, algorithm: str) -> list[Round]:
        """Return all rounds of an algorithm's schedule."""
        if algorithm not in self._rounds:
            schedule = schedule_for(algorithm, self._network, self._hosts)
            self._rounds[algorithm] = list(schedule(self._wait_policy.size))
        return self._rounds[algorithm]

    def _get(self, algorithm: str, buffer: np.ndarray, name: str) -> Reduce:
        """Return the function that sums flat buffers of one dtype and length by one algorithm.

        Raises:
            Mismatch: Ranks differ in algorithm, dtype or length.
        """
        key = (algorithm, buffer.dtype.str, buffer.size)
        if key not in self._agreed:
            self._wait_policy.name_call("the allreduce argument check", detail=f": {name}")
            keys: list[Key] = self._wait_policy.gather(key)
            if len(set(keys)) > 1:
                names = [f"rank {r}: {a} of {d}[{n}]" for r, (a, d, n) in enumerate(keys)]
                raise Mismatch(
                    "ranks called an allreduce with different algorithms, dtypes or lengths: "
                    f"{'; '.join(names)}"
                )
            self._agreed[key] = self._build(algorithm, buffer.size)
        return self._agreed[key]

    def _build(self, algorithm: str, length: int) -> Reduce:
        validate_one_host(algorithm, self._wait_policy.on_one_host)
        if algorithm in self._others:
            return self._others[algorithm]
        between = ALLREDUCE[algorithm].between
        if between is None or self._network or self._wait_policy.on_one_host:
            return self._scheduled(algorithm, length)
        hosts = self._hosts()
        steps = plan(between(self._wait_policy.size, hosts), self._wait_policy.rank, length)
        return self._in_levels(steps, min(map(len, hosts)), length)

    def _scheduled(self, algorithm: str, length: int) -> Reduce:
        steps = plan(self.rounds(algorithm), self._wait_policy.rank, length)

        def run(flat: np.ndarray, share: float = 1.0) -> None:
            if share != 1.0:
                scale(flat, share)
            self._executor.run(steps, flat, self._wait_policy.tag)

        return run

    def _in_levels(self, steps: RankPlan, parts: int, length: int) -> Reduce:
        """Return a function that sums by shared memory within hosts and by messages between hosts.

        Args:
            steps: The plan of this rank's messages between the hosts.
            parts: The number of parts into which the buffer is divided. The i-th rank of each host
                exchanges part i with other hosts.
            length: The number of elements of the buffer.
        """
        edges, local = boundaries(length, parts).tolist(), self._wait_policy.board.local_rank
        part = slice(edges[local], edges[local + 1]) if local < parts else slice(0)

        def run(flat: np.ndarray, share: float = 1.0) -> None:
            if share != 1.0:
                scale(flat, share)
            self._memory.wait_policy.adopt_call(self._wait_policy)
            carry = partial(self._executor.run, steps, tag=self._wait_policy.tag)
            self._memory.allreduce_around(flat, part, carry)

        return run

    def _hosts(self) -> list[list[int]]:
        """Return, for each real (not emulated) host, the list of its ranks."""
        hosts = set(
            self._allgather(
                tuple(self._wait_policy.board.ranks), "the search for ranks on the same host"
            )
        )
        return [list(ranks) for ranks in sorted(hosts)]
