"""Which server holds which weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import EllipsisType
from typing import TypeAlias

import numpy as np

from labkit.common.rows import cut
from labkit.common.state import record
from labkit.programs.actions import Vector

Index: TypeAlias = tuple[slice | EllipsisType, ...]  # into a tensor


@record()
@dataclass(frozen=True)
class Piece:
    """A tensor, or elements of it: where it begins and ends in the flat weights.

    Attributes:
        tensor: its number in the model.
        start, stop: in the flat weights.
        shape: None for a piece of a tensor that was cut.
    """

    tensor: int
    start: int
    stop: int
    shape: tuple[int, ...] | None

    def within(self, index: Index) -> list[Piece]:
        """What an index takes of the tensor, as stretches of the flat weights."""
        elements = np.arange(self.start, self.stop).reshape(self.shape or (-1,))[index].reshape(-1)
        ends = np.flatnonzero(np.diff(elements) > 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(elements, ends)]
        return [_within(self, *run) for run in runs]


@record()
@dataclass(frozen=True)
class Parts:
    """What one server holds: pieces of the flat weights, which lie one behind the other there."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the pieces; a piece of a tensor that was cut is a vector."""
        return [
            (piece.stop - piece.start,) if piece.shape is None else piece.shape
            for piece in self.pieces
        ]

    def take(self, flat: Vector) -> Vector:
        """The part of flat weights or gradients; a view where it is one stretch of them."""
        stretches = self._stretches
        if len(stretches) == 1:
            return flat[stretches[0][0] : stretches[0][1]]
        return np.concatenate([flat[start:stop] for start, stop in stretches] or [flat[:0]])

    def put(self, part: Vector, flat: Vector) -> None:
        """Write the part into flat weights."""
        at = 0
        for start, stop in self._stretches:
            flat[start:stop] = part[at : at + stop - start]
            at += stop - start

    def within(self, other: Parts) -> Parts:
        """What the other has of this part, by its places in this part's own vector."""
        found: list[Piece] = []
        at = 0
        for piece in self.pieces:
            for its in other.pieces:
                if piece.start < its.stop and its.start < piece.stop:
                    both, by = _within(piece, its.start, its.stop), at - piece.start
                    found.append(replace(both, start=both.start + by, stop=both.stop + by))
            at += piece.stop - piece.start
        return Parts(tuple(found))

    @cached_property
    def _stretches(self) -> list[tuple[int, int]]:
        """Pieces that follow on each other, as one."""
        found: list[tuple[int, int]] = []
        for piece in self.pieces:
            if found and found[-1][1] == piece.start:
                found[-1] = (found[-1][0], piece.stop)
            else:
                found.append((piece.start, piece.stop))
        return found


def placed(shapes: Sequence[tuple[int, ...]], servers: int, placement: str) -> list[Parts]:
    """What each server holds of tensors of these shapes, by a rule of `PLACEMENTS`."""
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
    tensors = [
        Piece(number, start, stop, tuple(shape))
        for number, ((start, stop), shape) in enumerate(zip(pairwise(ends), shapes, strict=True))
    ]
    return [Parts(tuple(pieces)) for pieces in PLACEMENTS[placement](tensors, servers)]


def round_robin(tensors: Sequence[Piece], servers: int) -> list[list[Piece]]:
    """Tensor k on server k mod n, as TensorFlow's `replica_device_setter` does by itself."""
    return [list(tensors[server::servers]) for server in range(servers)]


def greedy(tensors: Sequence[Piece], servers: int) -> list[list[Piece]]:
    """Each tensor, in the order of the model, on the server that holds least by then.

    Source: TensorFlow's `GreedyLoadBalancingStrategy` with `byte_size_load_fn`.
    """
    found: list[list[Piece]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for piece in tensors:
        least = loads.index(min(loads))
        found[least].append(piece)
        loads[least] += piece.stop - piece.start
    return found


def sharded(tensors: Sequence[Piece], servers: int) -> list[list[Piece]]:
    """Equal stretches of the flat weights: tensors are cut where a stretch ends."""
    edges = cut(tensors[-1].stop, [1.0] * servers)
    return [
        [
            _within(piece, first, last)
            for piece in tensors
            if piece.start < last and first < piece.stop
        ]
        for first, last in pairwise(edges)
    ]


def _within(piece: Piece, first: int, last: int) -> Piece:
    if first <= piece.start and piece.stop <= last:
        return piece
    return Piece(piece.tensor, max(first, piece.start), min(last, piece.stop), None)


PLACEMENTS: dict[str, Callable[[Sequence[Piece], int], list[list[Piece]]]] = {
    "round_robin": round_robin,
    "greedy": greedy,
    "sharded": sharded,
}
