"""The placement of weights on parameter servers."""

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

# An index expression that selects elements of a tensor.
Index: TypeAlias = tuple[slice | EllipsisType, ...]


@record()
@dataclass(frozen=True)
class TensorPiece:
    """A whole tensor, or a contiguous part of a tensor, as an index range of the flat weights.

    Attributes:
        tensor: Number of the tensor in the model's list of weights.
        start, stop: Range of indices in the flat weights; `stop` is excluded.
        shape: Shape of the tensor if the whole tensor is in this range; otherwise None.
    """

    tensor: int
    start: int
    stop: int
    shape: tuple[int, ...] | None

    def within(self, index: Index) -> list[TensorPiece]:
        """Return the ranges of the flat weights that an index into this tensor selects."""
        elements = np.arange(self.start, self.stop).reshape(self.shape or (-1,))[index].reshape(-1)
        ends = np.flatnonzero(np.diff(elements) > 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(elements, ends)]
        return [_within(self, *run) for run in runs]


@record()
@dataclass(frozen=True)
class ServerPieces:
    """The weights on one server: several ranges of the flat weights, concatenated."""

    pieces: tuple[TensorPiece, ...]

    @property
    def size(self) -> int:
        """The number of weights that the server stores."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors on this server; a part of a tensor counts as a flat vector."""
        return [
            (piece.stop - piece.start,) if piece.shape is None else piece.shape
            for piece in self.pieces
        ]

    def take(self, flat: Vector) -> Vector:
        """Return this server's elements of a flat vector, as a view if they are contiguous."""
        stretches = self._stretches
        if len(stretches) == 1:
            return flat[stretches[0][0] : stretches[0][1]]
        return np.concatenate([flat[start:stop] for start, stop in stretches] or [flat[:0]])

    def put(self, part: Vector, flat: Vector) -> None:
        """Write this server's elements into a flat vector of all weights."""
        at = 0
        for start, stop in self._stretches:
            flat[start:stop] = part[at : at + stop - start]
            at += stop - start

    def within(self, other: ServerPieces) -> ServerPieces:
        """Return the weights in both `self` and `other`, as ranges of this server's own vector."""
        pieces: list[TensorPiece] = []
        at = 0
        for piece in self.pieces:
            for other_piece in other.pieces:
                if piece.start < other_piece.stop and other_piece.start < piece.stop:
                    overlap, offset = (
                        _within(piece, other_piece.start, other_piece.stop),
                        at - piece.start,
                    )
                    pieces.append(
                        replace(overlap, start=overlap.start + offset, stop=overlap.stop + offset)
                    )
            at += piece.stop - piece.start
        return ServerPieces(tuple(pieces))

    @cached_property
    def _stretches(self) -> list[tuple[int, int]]:
        """The ranges of the flat weights on this server, where adjacent ranges are merged."""
        stretches: list[tuple[int, int]] = []
        for piece in self.pieces:
            if stretches and stretches[-1][1] == piece.start:
                stretches[-1] = (stretches[-1][0], piece.stop)
            else:
                stretches.append((piece.start, piece.stop))
        return stretches


def placed(shapes: Sequence[tuple[int, ...]], servers: int, placement: str) -> list[ServerPieces]:
    """Place tensors on servers by a named rule (`PLACEMENTS`); return the ranges of each server."""
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
    tensors = [
        TensorPiece(number, start, stop, tuple(shape))
        for number, ((start, stop), shape) in enumerate(zip(pairwise(ends), shapes, strict=True))
    ]
    return [ServerPieces(tuple(pieces)) for pieces in PLACEMENTS[placement](tensors, servers)]


def round_robin(tensors: Sequence[TensorPiece], servers: int) -> list[list[TensorPiece]]:
    """Place tensor k on server k mod n of n servers, like TensorFlow's `replica_device_setter`."""
    return [list(tensors[server::servers]) for server in range(servers)]


def greedy(tensors: Sequence[TensorPiece], servers: int) -> list[list[TensorPiece]]:
    """Place each tensor, in the model's order, on the server with the fewest weights so far.

    Reference: TensorFlow's `GreedyLoadBalancingStrategy` with `byte_size_load_fn`, which uses the
        same rule.
    """
    servers_pieces: list[list[TensorPiece]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for piece in tensors:
        least = loads.index(min(loads))
        servers_pieces[least].append(piece)
        loads[least] += piece.stop - piece.start
    return servers_pieces


def sharded(tensors: Sequence[TensorPiece], servers: int) -> list[list[TensorPiece]]:
    """Divide the flat weights into one range of equal size per server, which may divide tensors."""
    edges = cut(tensors[-1].stop, [1.0] * servers)
    return [
        [
            _within(piece, first, last)
            for piece in tensors
            if piece.start < last and first < piece.stop
        ]
        for first, last in pairwise(edges)
    ]


def _within(piece: TensorPiece, first: int, last: int) -> TensorPiece:
    if first <= piece.start and piece.stop <= last:
        return piece
    return TensorPiece(piece.tensor, max(first, piece.start), min(last, piece.stop), None)


PLACEMENTS: dict[str, Callable[[Sequence[TensorPiece], int], list[list[TensorPiece]]]] = {
    "round_robin": round_robin,
    "greedy": greedy,
    "sharded": sharded,
}
