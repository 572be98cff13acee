"""What each rank sends, by the textbook: number of messages and volume of every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.schedules.hierarchical import Hosts, host_groups
from labkit.schedules.round import Integers


@dataclass(frozen=True, eq=False)
class Counts:
    """Messages and volume of a schedule.

    Args: messages, volume: what each rank sends, shape (size,), the volume in chunks;
    chunks: number of equal parts of the buffer.
    """

    messages: Integers
    volume: Integers
    chunks: int

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Counts)
            and np.array_equal(self.messages, other.messages)
            and np.array_equal(self.volume, other.volume)
            and self.chunks == other.chunks
        )

    def bytes(self, nbytes: float) -> NDArray[np.float64]:
        """Bytes that each rank sends of a buffer of `nbytes`, shape (size,)."""
        return np.multiply(self.volume, nbytes / self.chunks, dtype=np.float64)


def textbook(name: str, size: int) -> Counts:
    """Messages and volume of an algorithm or collective, from its formula.

    p ranks, a buffer of n; P = 2^⌊lg p⌋, e = p - P ranks folded away (`folded`); all are sums
    over ranks:

        all_to_all       p(p - 1) messages         p(p - 1) n
        master_worker    2(p - 1)                  2(p - 1) n
        tree             2(p - 1)                  2(p - 1) n
        round_robin      2p(p - 1)                 2(p - 1) n
        butterfly        P lg P + 2e               (P lg P + 2e) n
        rabenseifner     2P lg P + 2e              (2(P - 1) + 2e) n
        ring             2p(p - 1)                 2(p - 1) n
        hierarchical     2(p - h) + 2h(h - 1)      2(p - 1) n                      (h hosts)
        spanning_trees   2p(p - 1)                 2(p - 1) n           (equal links)

    Raises: InvalidInput, for a name without a formula.
    """
    if name not in FORMULAS:
        raise InvalidInput(f"no formula for {name!r}: choose one of {', '.join(FORMULAS)}")
    return FORMULAS[name](size)


def hierarchical_counts(size: int, hosts: Hosts | None = None) -> Counts:
    """As `textbook("hierarchical", size)`, for any hosts."""
    groups = host_groups(size, -(-size // 2) if hosts is None else hosts)
    chunks = len(groups)
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for group in groups:
        inside = _tree(len(group)).messages
        messages[group], volume[group] = inside, inside * chunks
        messages[group[0]] += 2 * (chunks - 1)
        volume[group[0]] += 2 * (chunks - 1)
    return Counts(messages, volume, chunks)


def _everybody(size: int, messages: int, chunks: int) -> Counts:
    """Every rank sends as many messages, of one chunk each."""
    same = np.full(size, messages)
    return Counts(same, same, chunks)


def _whole(messages: Integers) -> Counts:
    """Every message is the whole buffer."""
    return Counts(messages, messages, 1)


def _one_or(size: int, root: int) -> Integers:
    """`root` messages of rank 0, one of every other."""
    return np.where(np.arange(size) == 0, root, 1)


def _children(size: int) -> Integers:
    """Children in the binomial tree: r + 2ᵏ < p for 2ᵏ below the lowest set bit of r."""
    lowest = [(rank & -rank).bit_length() - 1 if rank else size for rank in range(size)]
    room = [(size - 1 - rank).bit_length() for rank in range(size)]
    return np.minimum(lowest, room)


def _tree(size: int) -> Counts:
    return _whole(_children(size) + _one_or(size, 0))


def _folded(size: int, messages: int, volume: int, chunks: int) -> Counts:
    """`messages` and `volume` for those that take part; the fold's ranks send a whole more."""
    rank, hidden = np.arange(size), 2 * (size - _power(size))
    whole = (rank < hidden).astype(np.int64)
    takes_part = (rank >= hidden) | (rank % 2 == 0)
    return Counts(takes_part * messages + whole, takes_part * volume + whole * chunks, chunks)


def _power(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _lg(size: int) -> int:
    """⌊lg p⌋."""
    return size.bit_length() - 1


def _others_one(size: int, chunks: int) -> Counts:
    sent = _one_or(size, 0)
    return Counts(sent, sent, chunks)


def _root_all(size: int, chunks: int) -> Counts:
    sent = np.where(np.arange(size) == 0, size - 1, 0)
    return Counts(sent, sent, chunks)


FORMULAS: dict[str, Callable[[int], Counts]] = {
    "all_to_all": lambda p: _everybody(p, p - 1, 1),
    "master_worker": lambda p: _whole(_one_or(p, p - 1)),
    "tree": _tree,
    "round_robin": lambda p: _everybody(p, 2 * (p - 1), p),
    "butterfly": lambda p: _folded(p, _lg(p), _lg(p), 1),
    "rabenseifner": lambda p: _folded(p, 2 * _lg(p), 2 * (_power(p) - 1), _power(p)),
    "ring": lambda p: _everybody(p, 2 * (p - 1), p),
    "hierarchical": hierarchical_counts,
    "spanning_trees": lambda p: _everybody(p, 2 * (p - 1), p),
    "reduce_tree": lambda p: _whole(_one_or(p, 0)),
    "broadcast_tree": lambda p: _whole(_children(p)),
    "gather": lambda p: _others_one(p, p),
    "scatter": lambda p: _root_all(p, p),
    "allgather_ring": lambda p: _everybody(p, p - 1, p),
    "reduce_scatter_ring": lambda p: _everybody(p, p - 1, p),
}
