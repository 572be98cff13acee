"""Payloads of ranks on their way to all: a set of pieces that grows as messages meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from labkit.schedules import boundaries

Pieces: TypeAlias = dict[int, np.ndarray]  # rank -> bytes
ENTRY = np.dtype([("rank", "<i4"), ("nbytes", "<i4")])


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
