"""What a schedule's textbook says of it: messages and volume of each rank, and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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


class Line(Protocol):
    """What a formula asks of a network: the same latency (s) and bandwidth (bytes/s) for all."""

    @property
    def latency(self) -> float: ...

    @property
    def bandwidth(self) -> float: ...


@dataclass(frozen=True)
class Cost:
    """a·α + b·nβ + c·nγ: α latency (s), β s a byte, γ s to add a byte, n bytes."""

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0

    def seconds(self, nbytes: float, network: Line, gamma: float = 0.0) -> float:
        """Time of a buffer of `nbytes` on one switch with these links; gamma: s a byte."""
        per_byte = self.beta / network.bandwidth + self.gamma * gamma
        return self.alpha * network.latency + per_byte * nbytes

    def crossover(self, other: Cost, network: Line, gamma: float = 0.0) -> float | None:
        """The size in bytes at which both take as long; None where one is always ahead."""
        fixed = (self.alpha - other.alpha) * network.latency
        growth = (other.beta - self.beta) / network.bandwidth + (other.gamma - self.gamma) * gamma
        # Parallel lines, or such as meet where sizes are negative.
        if growth == 0 or fixed / growth <= 0:
            return None
        return fixed / growth

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.alpha + other.alpha, self.beta + other.beta, self.gamma + other.gamma)


def floor_lg(size: int) -> int:
    """⌊lg p⌋."""
    return size.bit_length() - 1


def ceil_lg(size: int) -> int:
    """⌈lg p⌉."""
    return (size - 1).bit_length()


def everybody(size: int, messages: int, chunks: int) -> Counts:
    """Every rank sends as many messages, of one chunk each."""
    same = np.full(size, messages)
    return Counts(same, same, chunks)


def one_or(size: int, root: int, chunks: int = 1) -> Counts:
    """One message of a chunk from every rank, but `root` of them from rank 0."""
    sent = np.where(np.arange(size) == 0, root, 1)
    return Counts(sent, sent, chunks)


def by_parts(size: int) -> Counts:
    """2(p - 1) messages of n/p from every rank: the least volume that there is."""
    return everybody(size, 2 * (size - 1), size)


def by_parts_cost(size: int) -> Cost:
    """The same one behind the other: 2(p - 1)α + 2(p - 1)/p nβ + (p - 1)/p nγ."""
    steps = size - 1
    return Cost(2 * steps, 2 * steps / size, steps / size)


def two_rounds_of_parts(size: int) -> tuple[Cost, ...]:
    """The same, when a rank hands all messages of a round over at once: α twice, not 2(p - 1)."""
    cost = by_parts_cost(size)
    return (Cost(2 * (size > 1), cost.beta, cost.gamma),)
