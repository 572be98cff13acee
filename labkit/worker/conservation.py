"""The law that a lossy exchange is held to: nothing is lost but what is carried over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from labkit.communicator import Communicator
from labkit.exchange import Layer, Seen

TOLERANCE = {4: 1e-5, 8: 1e-12}  # of the greatest values of all steps, by bytes of a value


@dataclass
class _Sums:
    """Of one bucket over all steps, in float64."""

    given: np.ndarray
    sent: np.ndarray
    mean: np.ndarray
    residual: np.ndarray | None
    itemsize: int
    size: float = 0.0  # of the greatest values given, over all steps


@dataclass
class Audit:
    r"""Keeps its own books on every bucket of an exchange with a compressor.

    Over T steps, on each rank, what was sent and what is carried over are what was given:
    \(\sum_t s_t + e_T = \sum_t g_t\). Over the ranks, what was applied is the mean of what was
    sent: \(\frac1n \sum_r \sum_t s_{r,t} = \sum_t \hat g_t\).

    Both hold up to rounding; the second one only as exactly as payloads are summed on the way.

    Args:
        communicator: the ranks.
        remembers: whether the first law holds: error is fed back.
        rounding: relative error of a sum on the way.
    """

    communicator: Communicator
    remembers: bool
    rounding: float = 0.0
    _books: dict[int, _Sums] = field(default_factory=dict)

    def look(self, bucket: int, layers: Sequence[Layer], seen: Seen) -> None:
        """A watcher of `Exchange`."""
        if bucket not in self._books:
            zero = np.zeros(len(seen.given))
            self._books[bucket] = _Sums(
                zero, zero.copy(), zero.copy(), None, seen.given.dtype.itemsize
            )
        books = self._books[bucket]
        books.size += float(np.abs(seen.given).max(initial=0.0))
        books.given += seen.given
        books.sent += seen.sent
        books.mean += seen.mean
        books.residual = seen.residual

    def difference(self) -> tuple[float, float]:
        """The worst violation of both laws on any rank, and what rounding allows (collective)."""
        # Books without an entry prove nothing: a compressor that was passed by would pass.
        found: list[tuple[float, float]] = [] if self._books else [(np.inf, 0.0)]
        for books in self._books.values():
            exact = TOLERANCE[max(books.itemsize, 4)] * max(books.size, 1e-3)
            shared = self.communicator.tally(books.sent, "the audit") / self.communicator.size
            summed = exact + 2 * self.rounding * books.size
            found.append((_largest(shared - books.mean), summed))
            if self.remembers and books.residual is not None:
                found.append((_largest(books.sent + books.residual - books.given), exact))
        told = self.communicator.allgather(found, "the audit")
        everyones: list[tuple[float, float]] = [pair for own in told for pair in own]
        return max(everyones, key=_excess)


def _excess(pair: tuple[float, float]) -> float:
    """By how much a difference is more than allowed; what is not a number is worst of all."""
    difference, allowed = pair
    return difference / allowed if allowed and np.isfinite(difference) else np.inf


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))
