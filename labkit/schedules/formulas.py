"""Textbook formulas for the time of a schedule and for the messages and bytes of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.schedules.round import Integers


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers of messages and of chunks that each rank sends in a schedule.

    Args:
        messages: Number of messages that each rank sends, shape (size,).
        volume: Number of chunks that each rank sends, shape (size,).
        chunks: Number of equal parts of the buffer; one part is the unit of `volume`.
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
        """Return the bytes that each rank sends for a buffer of `nbytes`, shape (size,)."""
        return np.multiply(self.volume, nbytes / self.chunks, dtype=np.float64)


class LinkParameters(Protocol):
    """The parameters of a uniform network: one latency (s) and one bandwidth (bytes/s)."""

    @property
    def latency(self) -> float: ...

    @property
    def bandwidth(self) -> float: ...


@dataclass(frozen=True)
class AlphaBetaCost:
    """The time a·α + b·nβ + c·nγ for n bytes: latency α (s); transfer β and addition γ (s/byte)."""

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0

    def seconds(self, nbytes: float, network: LinkParameters, gamma: float = 0.0) -> float:
        """Return the time in s for a buffer of `nbytes` on one switch; `gamma` is in s/byte."""
        per_byte = self.beta / network.bandwidth + self.gamma * gamma
        return self.alpha * network.latency + per_byte * nbytes

    def crossover(
        self, other: AlphaBetaCost, network: LinkParameters, gamma: float = 0.0
    ) -> float | None:
        """Return the buffer size in bytes at which both costs are equal; None if there is none."""
        fixed = (self.alpha - other.alpha) * network.latency
        growth = (other.beta - self.beta) / network.bandwidth + (other.gamma - self.gamma) * gamma
        # The two cost lines are parallel, or they cross at a size that is not positive.
        if growth == 0 or fixed / growth <= 0:
            return None
        return fixed / growth

    def __add__(self, other: AlphaBetaCost) -> AlphaBetaCost:
        return AlphaBetaCost(
            self.alpha + other.alpha, self.beta + other.beta, self.gamma + other.gamma
        )


def floor_lg(size: int) -> int:
    """⌊lg p⌋."""
    return size.bit_length() - 1


def ceil_lg(size: int) -> int:
    """⌈lg p⌉."""
    return (size - 1).bit_length()


def uniform_counts(size: int, messages: int, chunks: int) -> Counts:
    """Return the counts if every rank sends `messages` messages of one chunk each."""
    same = np.full(size, messages)
    return Counts(same, same, chunks)


def rooted_counts(size: int, root: int, chunks: int = 1) -> Counts:
    """Return the counts if rank 0 sends `root` messages and other ranks one, of one chunk each."""
    sent = np.where(np.arange(size) == 0, root, 1)
    return Counts(sent, sent, chunks)


def chunked_counts(size: int) -> Counts:
    """Return the counts 2(p - 1) messages of n/p bytes per rank: an allreduce's least volume."""
    return uniform_counts(size, 2 * (size - 1), size)


def chunked_cost(size: int) -> AlphaBetaCost:
    """Return the cost 2(p - 1)α + 2(p - 1)/p nβ + (p - 1)/p nγ of messages sent one by one."""
    steps = size - 1
    return AlphaBetaCost(2 * steps, 2 * steps / size, steps / size)


def two_round_costs(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the cost if ranks send each round's messages at once: latency 2α, not 2(p - 1)α."""
    cost = chunked_cost(size)
    return (AlphaBetaCost(2 * (size > 1), cost.beta, cost.gamma),)
