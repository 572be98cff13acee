"""Collectives over values of unequal size: payloads gathered, sparse vectors and rows summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from labkit.communicator.algorithms import UNMETERED
from labkit.communicator.emulation import Emulation
from labkit.communicator.numbers import check_summable
from labkit.communicator.reductions import Reductions, library_sum
from labkit.communicator.sparse import (
    INDEX,
    Part,
    SparseSum,
    cut_sparse,
    merged,
    row_bytes,
    rows_of,
)
from labkit.communicator.variable import Courier
from labkit.communicator.wait_policy import WaitPolicy
from labkit.schedules import ALLREDUCE, Round, boundaries, count_chunks

Pieces: TypeAlias = dict[int, np.ndarray]  # rank -> bytes
ENTRY = np.dtype([("rank", "<i4"), ("nbytes", "<i4")])


class Payloads:
    """What one rank does in them.

    A schedule of an allreduce adds up whatever can be added. Sets of payloads are added by
    uniting them, so that every algorithm gathers; of one that ends with an allgather, that is
    enough.

    Args:
        patience: how this rank waits; it notices who is missing before the library's collectives.
        emulation: the network to emulate, or None.
        reductions: know the rounds of each algorithm, and meter.
    """

    def __init__(
        self, patience: WaitPolicy, emulation: Emulation | None, reductions: Reductions
    ) -> None:
        self._rank, self._size = patience.rank, patience.size
        self._courier, self._patience = Courier(patience, emulation, reductions.rules), patience
        self._rounds, self._metered = reductions.rounds, reductions.metered

    def gather_bytes(
        self, data: np.ndarray, algorithm: str = "mpi", what: str = "gather_bytes"
    ) -> list[np.ndarray]:
        """The bytes of every rank, in rank order; ranks may hold different numbers of them.

        Args:
            data: uint8, of one dimension.
            algorithm: as for `Communicator.allreduce`: its messages carry sets of what is known so
                far, the ring's second half alone; "mpi" and "shared_memory": the library's
                allgather.
            what: name of the call in messages about waits.
        """
        with self._metered(f"{what} ({algorithm} gather)", data.nbytes, algorithm):
            return self._gather(data, algorithm)

    def sparse_sum(
        self,
        indices: np.ndarray,
        values: np.ndarray,
        length: int,
        algorithm: str = "mpi",
        what: str = "sparse_sum",
    ) -> np.ndarray:
        """The sum of the ranks' sparse vectors, dense (length,), to the same bits on all.

        Args:
            indices: int32 (k,), ascending, each once; ranks may hold different numbers of them.
            values: (k,).
            length: of the vectors, the same on all ranks.
            algorithm: as for `Communicator.allreduce`; parts turn dense on their way where that is
                cheaper.
            what: name of the call in messages about waits.
        """
        parts, _ = self._sum(indices, values, length, algorithm, what)
        return np.concatenate([part.dense() for part in parts])

    def sum_rows(
        self,
        indices: np.ndarray,
        rows: np.ndarray,
        length: int,
        algorithm: str = "mpi",
        what: str = "sum_rows",
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sum of the ranks' tables of which each has a few rows, to the same bits on all.

        Args:
            indices, length, algorithm, what: as for `sparse_sum`, of rows.
            rows: (k, …), contiguous.

        Returns:
            indices: of the rows that some rank has; or of all, where these were no fewer bytes.
            rows: their sums.
        """
        parts, edges = self._sum(indices, rows, length, algorithm, what)
        return rows_of(parts, edges)

    def _sum(
        self, indices: np.ndarray, values: np.ndarray, length: int, algorithm: str, what: str
    ) -> tuple[list[Part], list[int]]:
        """The parts of the sum, and where they begin and end."""
        check_summable(values.dtype)
        row = values.shape[1:]
        place = f"{what} ({algorithm} of sparse {values.dtype.name}{[length, *row]})"
        with self._metered(place, indices.nbytes + values.nbytes, algorithm):
            if self._size == 1:
                return [Part(length, indices, values)], [0, length]
            if algorithm in UNMETERED:
                return [self._library_sum(indices, values, length)], [0, length]
            rounds = self._rounds(algorithm)
            edges: list[int] = boundaries(length, count_chunks(rounds)).tolist()
            parts = cut_sparse(indices, values, edges)
            return self._courier.run(rounds, parts, SparseSum(edges, values.dtype, row)), edges

    def _gather(self, data: np.ndarray, algorithm: str) -> list[np.ndarray]:
        if self._size == 1:
            return [data]
        if algorithm in UNMETERED:
            return self._library_gather(data)
        if (allgather := ALLREDUCE[algorithm].gathers) is not None:
            chunks: list[Pieces] = [{} for _ in range(self._size)]
            chunks[self._rank] = {self._rank: data}
            rounds: Sequence[Round] = list(allgather(self._size))
            chunks = self._courier.run(rounds, chunks, Union())
            return [chunk[rank] for rank, chunk in enumerate(chunks)]
        rounds = self._rounds(algorithm)
        chunks = cut(data, self._rank, count_chunks(rounds))
        return joined(self._courier.run(rounds, chunks, Union()), self._size)

    def _library_sum(self, indices: np.ndarray, values: np.ndarray, length: int) -> Part:
        """By a gathering, or dense where that would be twice the bytes of all values or more."""
        held = self._patience.gather_here(len(indices)).astype(int)
        row = row_bytes(values)
        if held.sum() * (INDEX.itemsize + row) >= 2 * length * row:
            total = Part(length, indices, values).dense()
            library_sum(self._patience, total.reshape(-1))
            return Part(length, None, total)
        places = np.empty(held.sum(), indices.dtype)
        found = np.empty((held.sum(), *values.shape[1:]), values.dtype)
        self._patience.call("Allgatherv", indices, (places, held))
        self._patience.call("Allgatherv", as_bytes(values), (as_bytes(found), held * row))
        self._count(indices.nbytes + values.nbytes)
        return Part(length, *merged(places, found))

    def _library_gather(self, data: np.ndarray) -> list[np.ndarray]:
        lengths = self._patience.gather_here(data.nbytes).astype(int)
        whole = np.zeros(lengths.sum(), np.uint8)
        self._patience.call("Allgatherv", data, (whole, lengths))
        self._count(data.nbytes)
        return np.split(whole, np.cumsum(lengths)[:-1])

    def _count(self, nbytes: int) -> None:
        """What the library gathers of this rank: to each other one, and once out of the host."""
        self._patience.count((self._size - 1) * nbytes, nbytes)


class Union:
    """Added, sets of pieces are one set; an allreduce over them is an allgather."""

    def add(self, values: Sequence[Pieces]) -> Pieces:
        """All pieces."""
        return {rank: data for value in values for rank, data in value.items()}

    def to_bytes(self, values: Sequence[Pieces]) -> np.ndarray:
        """A table of ranks and lengths behind a count for each chunk, then the pieces."""
        parts: list[np.ndarray] = []
        for value in values:
            table = np.array([(rank, data.nbytes) for rank, data in value.items()], ENTRY)
            parts += [np.array([len(table)], "<i4").view(np.uint8), table.view(np.uint8)]
            parts += value.values()
        return np.concatenate(parts)

    def from_bytes(self, data: np.ndarray, first: int, count: int) -> list[Pieces]:
        """The pieces of each chunk."""
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


def cut(data: np.ndarray, rank: int, chunks: int) -> list[Pieces]:
    """A rank's payload as one set of pieces a chunk."""
    edges = boundaries(len(data), chunks)
    return [{rank: data[edges[c] : edges[c + 1]]} for c in range(chunks)]


def joined(chunks: Sequence[Pieces], size: int) -> list[np.ndarray]:
    """The payload of each rank."""
    return [np.concatenate([chunk[rank] for chunk in chunks]) for rank in range(size)]


def as_bytes(values: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array."""
    return values.reshape(-1).view(np.uint8)
