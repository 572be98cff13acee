"""Collectives for values whose sizes differ between ranks, e.g. gathers and sparse sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.reductions import UNMETERED, Reductions, library_sum
from labkit.communicator.sparse import (
    INDEX,
    SparseSum,
    SparseVector,
    cut_sparse,
    join_rows,
    merged,
    row_bytes,
)
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import MessageRules, MpiWire, Seal, validate_summable
from labkit.schedules import ALLREDUCE, Round, boundaries, count_chunks

Value = TypeVar("Value")


class ValueKind(Protocol[Value]):
    """The addition and serialization of one type of values."""

    def add(self, values: Sequence[Value]) -> Value:
        """Return the sum of the values, added in the given order."""

    def to_bytes(self, values: Sequence[Value]) -> np.ndarray:
        """Serialize the values into one message, an array of uint8."""

    def from_bytes(self, data: np.ndarray, first: int, count: int) -> list[Value]:
        """Return the values of the chunks `first` to `first + count - 1` from a message."""


class VariableSizeExecutor:
    """An executor of this rank's sends and receives in a schedule with chunks of any size.

    A header with the message's length precedes each message. The traffic meter does not count
    length headers, as it does not count the headers of MPI.

    Args:
        wait_policy: The wait policy of this rank, with its communicator and traffic meter.
        emulation: The emulated network; None: the real network.
        rules: The rules for checksums and fault injection in all messages.
    """

    def __init__(
        self,
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        rules: MessageRules | None = None,
    ) -> None:
        self._wire = MpiWire(wait_policy.comm, rules, wait_policy)
        self._comm, self._rank, self._emulation = wait_policy.comm, wait_policy.rank, emulation
        self._wait_policy, self._traffic, self._wait = (
            wait_policy,
            wait_policy.traffic,
            wait_policy.wait_all,
        )
        self._sleep_until = wait_policy.sleep_until

    def run(
        self, rounds: Sequence[Round], chunks: list[Value], kind: ValueKind[Value]
    ) -> list[Value]:
        """Run the rounds of a schedule, and return the chunks after the last round.

        Args:
            rounds: The rounds of the schedule.
            chunks: The initial values of this rank, one per chunk.
            kind: The object that adds and serializes the values.
        """
        for step in rounds:
            sends, receives = step.sent_by(self._rank).rows(), step.received_by(self._rank).rows()
            if not sends and not receives:
                continue
            outgoing = [
                (destination, kind.to_bytes(chunks[chunk : chunk + span]))
                for _, destination, chunk, span, _ in sends
            ]
            incoming = self._exchange(outgoing, [row[0] for row in receives])
            chunks = _merge_received(chunks, receives, incoming, kind, self._rank)
        return chunks

    def _exchange(
        self, outgoing: list[tuple[int, np.ndarray]], sources: list[int]
    ) -> list[np.ndarray]:
        """Send and receive all messages of a round; return after their delivery."""
        headers, tag = [np.zeros(2) for _ in sources], self._wait_policy.tag
        requests = [
            self._comm.Irecv(h, source, tag) for h, source in zip(headers, sources, strict=True)
        ]
        turn = self._emulation.turn() if self._emulation and outgoing else 0
        for destination, data in outgoing:
            ticket = 0.0
            if self._emulation:
                ticket = self._emulation.depart(destination, data.nbytes, turn)
                for moment in self._emulation.send_moments(ticket):
                    self._sleep_until(moment)
            header = np.array([ticket, float(data.nbytes)])
            requests.append(self._comm.Isend(header, destination, tag))
            self._wait_policy.count_to(destination, data.nbytes)
        self._wait(requests)
        incoming = [np.zeros(int(header[1]), np.uint8) for header in headers]
        seals: list[Seal] = []
        requests = []
        for data, source in zip(incoming, sources, strict=True):
            requests += self._wire.expect(data, source, tag, seals)
        for destination, data in outgoing:
            requests += self._wire.post(data, destination, tag)
        self._wait(requests)
        self._wire.verify(seals)
        if self._emulation and sources:
            arrivals = [
                (float(header[0]), source, int(header[1]))
                for header, source in zip(headers, sources, strict=True)
            ]
            for moment in self._emulation.deliveries(arrivals):
                self._sleep_until(moment)
        return incoming


def _merge_received(
    chunks: list[Value],
    receives: list[tuple[int, int, int, int, bool]],
    incoming: list[np.ndarray],
    kind: ValueKind[Value],
    rank: int,
) -> list[Value]:
    """Return the chunks after a round; each received value replaces a chunk or is added to it."""
    after = list(chunks)
    contributions: dict[int, list[tuple[int, Value]]] = {}
    for (source, _, chunk, span, reduce), data in zip(receives, incoming, strict=True):
        for number, value in enumerate(kind.from_bytes(data, chunk, span), start=chunk):
            if reduce:
                terms = contributions.setdefault(number, [(rank, chunks[number])])
                terms.append((source, value))
            else:
                after[number] = value
    for number, terms in contributions.items():
        ordered = sorted(terms, key=lambda pair: pair[0])
        after[number] = kind.add([value for _, value in ordered])
    return after


Pieces: TypeAlias = dict[int, np.ndarray]  # rank -> bytes
ENTRY = np.dtype([("rank", "<i4"), ("nbytes", "<i4")])


class Payloads:
    """One rank's collectives for values whose sizes differ between ranks.

    An allreduce schedule works for values of any type that defines an addition. Allreduce can add
    sets of payloads, where the addition is the union of sets. With set union as the addition, every
    allreduce algorithm gathers all ranks' payloads. If an allreduce has an allgather phase,
    payloads need only the allgather phase.

    Args:
        wait_policy: The wait policy of this rank, which detects missing ranks before a collective
            of the MPI library.
        emulation: The emulated network; None: the real network.
        reductions: The `Reductions` of this rank, which supply the schedules and the metering of
            the collectives.
    """

    def __init__(
        self, wait_policy: WaitPolicy, emulation: Emulation | None, reductions: Reductions
    ) -> None:
        self._rank, self._size = wait_policy.rank, wait_policy.size
        self._executor, self._wait_policy = (
            VariableSizeExecutor(wait_policy, emulation, reductions.rules),
            wait_policy,
        )
        self._rounds, self._metered = reductions.rounds, reductions.metered

    def gather_bytes(
        self, data: np.ndarray, algorithm: str = "mpi", label: str = "gather_bytes"
    ) -> list[np.ndarray]:
        """Gather the bytes of every rank, in rank order; ranks may differ in the number of bytes.

        Args:
            data: The bytes of this rank, as a uint8 array of shape (n,). The length n may differ
                between ranks.
            algorithm: Name of an algorithm, as in `Communicator.allreduce`. The messages of a
                schedule contain sets of payloads. The ring algorithm runs only its second half,
                which is an allgather. The algorithms "mpi" and "shared_memory" use the allgather of
                the MPI library.
            label: The name of the call in error messages.
        """
        with self._metered(f"{label} ({algorithm} gather)", data.nbytes, algorithm):
            return self._gather(data, algorithm)

    def sparse_sum(
        self,
        indices: np.ndarray,
        values: np.ndarray,
        length: int,
        algorithm: str = "mpi",
        label: str = "sparse_sum",
    ) -> np.ndarray:
        """Sum the ranks' sparse vectors into a dense vector, bitwise equal on all ranks.

        Args:
            indices: The indices of the elements that this rank stores, int32 (k,), strictly
                ascending. The number k may differ between ranks.
            values: The elements of this rank's vector at `indices`, shape (k,); all other elements
                are 0.
            length: The length of the vectors, the same on all ranks.
            algorithm: Name of an algorithm, as in `Communicator.allreduce`. A schedule sends a
                partial sum as a dense vector if that saves bytes.
            label: The name of the call in error messages.

        Returns:
            The dense sum, of shape (length,).
        """
        parts, _ = self._sum(indices, values, length, algorithm, label)
        return np.concatenate([part.dense() for part in parts])

    def sum_rows(
        self,
        indices: np.ndarray,
        rows: np.ndarray,
        length: int,
        algorithm: str = "mpi",
        label: str = "sum_rows",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sum the ranks' sparse tables, each given by a few rows; all sums are bitwise equal.

        Args:
            indices, length, algorithm, label: As in `sparse_sum`, where the elements are rows of
                the table.
            rows: The rows of this rank at `indices`, shape (k, …), contiguous.

        Returns:
            indices: The indices of all rows that at least one rank has. If a chunk of the table
                became dense in the sum, all indices of this chunk are returned.
            rows: The sum over all ranks of each row in `indices`.
        """
        parts, edges = self._sum(indices, rows, length, algorithm, label)
        return join_rows(parts, edges)

    def _sum(
        self, indices: np.ndarray, values: np.ndarray, length: int, algorithm: str, what: str
    ) -> tuple[list[SparseVector], list[int]]:
        """Return the sum as a list of chunks, and the element indices of the chunk boundaries."""
        validate_summable(values.dtype)
        row = values.shape[1:]
        name = f"{what} ({algorithm} of sparse {values.dtype.name}{[length, *row]})"
        with self._metered(name, indices.nbytes + values.nbytes, algorithm):
            if self._size == 1:
                return [SparseVector(length, indices, values)], [0, length]
            if algorithm in UNMETERED:
                return [self._library_sum(indices, values, length)], [0, length]
            rounds = self._rounds(algorithm)
            edges: list[int] = boundaries(length, count_chunks(rounds)).tolist()
            parts = cut_sparse(indices, values, edges)
            return self._executor.run(rounds, parts, SparseSum(edges, values.dtype, row)), edges

    def _gather(self, data: np.ndarray, algorithm: str) -> list[np.ndarray]:
        if self._size == 1:
            return [data]
        if algorithm in UNMETERED:
            return self._library_gather(data)
        if (allgather := ALLREDUCE[algorithm].gathers) is not None:
            chunks: list[Pieces] = [{} for _ in range(self._size)]
            chunks[self._rank] = {self._rank: data}
            rounds: Sequence[Round] = list(allgather(self._size))
            chunks = self._executor.run(rounds, chunks, PayloadUnion())
            return [chunk[rank] for rank, chunk in enumerate(chunks)]
        rounds = self._rounds(algorithm)
        chunks = cut_payload(data, self._rank, count_chunks(rounds))
        return join_payloads(self._executor.run(rounds, chunks, PayloadUnion()), self._size)

    def _library_sum(self, indices: np.ndarray, values: np.ndarray, length: int) -> SparseVector:
        """Sum with the MPI library, as a gather of sparse vectors or an allreduce of dense vectors.

        The sum is dense if gathering would need at least twice the bytes of a dense vector.
        """
        counts = self._wait_policy.allgather_scalar(len(indices)).astype(int)
        row = row_bytes(values)
        if counts.sum() * (INDEX.itemsize + row) >= 2 * length * row:
            total = SparseVector(length, indices, values).dense()
            library_sum(self._wait_policy, total.reshape(-1))
            return SparseVector(length, None, total)
        all_indices = np.empty(counts.sum(), indices.dtype)
        all_values = np.empty((counts.sum(), *values.shape[1:]), values.dtype)
        self._wait_policy.call("Allgatherv", indices, (all_indices, counts))
        self._wait_policy.call("Allgatherv", as_bytes(values), (as_bytes(all_values), counts * row))
        self._count(indices.nbytes + values.nbytes)
        return SparseVector(length, *merged(all_indices, all_values))

    def _library_gather(self, data: np.ndarray) -> list[np.ndarray]:
        lengths = self._wait_policy.allgather_scalar(data.nbytes).astype(int)
        whole = np.zeros(lengths.sum(), np.uint8)
        self._wait_policy.call("Allgatherv", data, (whole, lengths))
        self._count(data.nbytes)
        return np.split(whole, np.cumsum(lengths)[:-1])

    def _count(self, nbytes: int) -> None:
        """Count the traffic of an MPI allgather.

        A rank sends a copy of its bytes to every other rank. With several hosts, one of
        the copies goes to another host.
        """
        self._wait_policy.count((self._size - 1) * nbytes, nbytes)


class PayloadUnion:
    """The union of payload sets; with this union as its sum, an allreduce gathers all payloads."""

    def add(self, values: Sequence[Pieces]) -> Pieces:
        """Return the union of several payload sets."""
        return {rank: data for value in values for rank, data in value.items()}

    def to_bytes(self, values: Sequence[Pieces]) -> np.ndarray:
        """Serialize, per chunk, the number of payload pieces and their ranks, lengths and bytes."""
        parts: list[np.ndarray] = []
        for value in values:
            table = np.array([(rank, data.nbytes) for rank, data in value.items()], ENTRY)
            parts += [np.array([len(table)], "<i4").view(np.uint8), table.view(np.uint8)]
            parts += value.values()
        return np.concatenate(parts)

    def from_bytes(self, data: np.ndarray, first: int, count: int) -> list[Pieces]:
        """Return, for each chunk in a message, a dictionary with each rank's payload bytes."""
        values: list[Pieces] = []
        start = 0
        for _ in range(count):
            entries = int(data[start : start + 4].view("<i4")[0])
            start += 4
            stop = start + entries * ENTRY.itemsize
            table, start = data[start:stop].view(ENTRY), stop
            pieces: Pieces = {}
            for rank, nbytes in table.tolist():
                pieces[rank] = data[start : start + nbytes]
                start += nbytes
            values.append(pieces)
        return values


def cut_payload(data: np.ndarray, rank: int, chunks: int) -> list[Pieces]:
    """Cut a rank's payload into byte ranges, one dictionary {rank: bytes} per chunk."""
    edges = boundaries(len(data), chunks)
    return [{rank: data[edges[c] : edges[c + 1]]} for c in range(chunks)]


def join_payloads(chunks: Sequence[Pieces], size: int) -> list[np.ndarray]:
    """Join each rank's bytes from all chunks into the payload of that rank."""
    return [np.concatenate([chunk[rank] for chunk in chunks]) for rank in range(size)]


def as_bytes(values: np.ndarray) -> np.ndarray:
    """Return a flat uint8 view of a contiguous array."""
    return values.reshape(-1).view(np.uint8)
