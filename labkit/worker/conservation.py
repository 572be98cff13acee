"""The law that a lossy exchange is held to: nothing is lost between a gradient and its use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from labkit.communicator import Communicator
from labkit.compression.residual_law import Waiting
from labkit.exchange import Layer, Seen

TOLERANCE = {4: 1e-5, 8: 1e-12}  # of the greatest values of all steps, by bytes of a value


class Found(NamedTuple):
    """By how much a law is violated, what rounding allows, and what is then wrong."""

    difference: float
    allowed: float
    what: str

    @property
    def excess(self) -> float:
        """The difference in units of what is allowed; what is not a number is worst of all."""
        finite = self.allowed and np.isfinite(self.difference)
        return self.difference / self.allowed if finite else np.inf


@dataclass
class _Sums:
    """Of one bucket over all steps, in float64."""

    sent: np.ndarray
    mean: np.ndarray
    waiting: Waiting | None
    itemsize: int
    size: float = 0.0  # of the greatest values, over all steps
    lost: float = 0.0  # the worst violation of the first law in any step


@dataclass
class Audit:
    r"""Keeps its own books on every bucket of an exchange with a compressor.

    After every step, on each rank, what it keeps is what must wait by the method's law (see
    `Waiting`): \(e_T = \sum_t g_t - \sum_t s_t\), and for DGC the same of its velocities. Over the
    ranks, the mean is that of what was sent: \(\frac1n \sum_r \sum_t s_{r,t} = \sum_t \hat g_t\).

    Both hold up to rounding; the second one only as exactly as payloads are summed on the way.

    Args:
        communicator: the ranks.
        remembers: whether the first law holds: what is not sent waits.
        rounding: relative error of a sum on the way.
        law: makes the books of what must wait in a bucket.
    """

    communicator: Communicator
    remembers: bool
    rounding: float = 0.0
    law: Callable[[], Waiting | None] = Waiting
    _books: dict[int, _Sums] = field(default_factory=dict)

    def look(self, bucket: int, layers: Sequence[Layer], seen: Seen) -> None:
        """A watcher of `Exchange`."""
        if bucket not in self._books:
            zero = np.zeros(len(seen.given))
            law = self.law() if self.remembers else None
            self._books[bucket] = _Sums(zero, zero.copy(), law, seen.given.dtype.itemsize)
        books = self._books[bucket]
        books.sent += seen.sent
        books.mean += seen.mean
        expected = np.zeros(0)
        if books.waiting is not None:
            expected = books.waiting.after(seen.given, seen.sent)
            kept = np.nan if seen.residual is None else seen.residual
            books.lost = float(np.max([books.lost, _largest(kept - expected)]))
        books.size += max(_largest(seen.given), _largest(expected), _largest(seen.sent))

    def difference(self) -> tuple[float, float]:
        """The worst violation of both laws on any rank, and what rounding allows (collective)."""
        worst = self.verdict()
        return worst.difference, worst.allowed

    def verdict(self, more: Sequence[Found] = ()) -> Found:
        """The worst violation of both laws, or of more, on any rank (collective)."""
        # Books without an entry prove nothing: a compressor that was passed by would pass.
        nothing = Found(np.inf, 0.0, "nothing went through the compressor")
        found = [*(self._violations() if self._books else [nothing]), *more]
        told = self.communicator.allgather([tuple(each) for each in found], "the audit")
        return max((Found(*each) for own in told for each in own), key=lambda each: each.excess)

    def _violations(self) -> Iterator[Found]:
        for number, books in sorted(self._books.items()):
            exact = TOLERANCE[max(books.itemsize, 4)] * max(books.size, 1e-3)
            shared = self.communicator.tally(books.sent, "the audit") / self.communicator.size
            summed = exact + 2 * self.rounding * books.size
            what = f"the mean of bucket {number} is not that of what ranks have sent"
            yield Found(_largest(shared - books.mean), summed, what)
            if books.waiting is not None:
                what = f"of bucket {number} a rank keeps other than what it was given and not sent"
                yield Found(books.lost, exact, what)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))
