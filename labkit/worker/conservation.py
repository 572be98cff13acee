"""The conservation law of a lossy exchange: what is not sent stays in the residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from labkit.communicator import Communicator
from labkit.compression.residual_law import ExpectedResidual
from labkit.exchange import BucketLayer, ReductionRecord

# Tolerance by bytes of a float, relative to the sum of each step's largest value.
TOLERANCE = {4: 1e-5, 8: 1e-12}


class Violation(NamedTuple):
    """The size of a conservation law's violation, the allowed rounding error, and a description."""

    difference: float
    allowed: float
    what: str

    @property
    def excess(self) -> float:
        """The ratio of the violation to the allowed error; infinity if the violation is NaN."""
        finite = self.allowed and np.isfinite(self.difference)
        return self.difference / self.allowed if finite else np.inf


@dataclass
class _Sums:
    """Sums over all steps of the values that one bucket sent and received, in float64."""

    sent: np.ndarray
    mean: np.ndarray
    waiting: ExpectedResidual | None
    itemsize: int
    size: float = 0.0  # sum over all steps of the largest absolute values
    lost: float = 0.0  # largest violation of the residual law of `Audit` in any step


@dataclass
class Audit:
    r"""Audits each bucket of a compressed gradient exchange by two conservation laws.

    The first law, about the residual, holds on each rank after every step. The residual is the sum
    of gradients minus the sum of values sent (see `ExpectedResidual`), \(e_T = \sum_t g_t - \sum_t
    s_t\). For DGC, the velocities obey a conservation law of the same form. The second law, about
    the mean gradients, holds over all ranks. The sum of mean gradients is the mean over the ranks
    of the values sent, \(\frac1n \sum_r \sum_t s_{r,t} = \sum_t \hat g_t\).

    Both conservation laws hold up to rounding errors. For the law about mean gradients, rounding
    errors in the sum of payloads are allowed, too.

    Args:
        communicator: Communicator of the ranks that exchange gradients.
        remembers: Whether the compressor stores a residual, so that the first law applies.
        rounding: Relative rounding error of a sum of payloads.
        law: Function that creates the expected residual of a bucket.
    """

    communicator: Communicator
    remembers: bool
    rounding: float = 0.0
    law: Callable[[], ExpectedResidual | None] = ExpectedResidual
    _books: dict[int, _Sums] = field(default_factory=dict)

    def observe(self, bucket: int, layers: Sequence[BucketLayer], record: ReductionRecord) -> None:
        """Add the values of a bucket's step to the sums; `Exchange` calls this for each bucket."""
        if bucket not in self._books:
            zero = np.zeros(len(record.given))
            law = self.law() if self.remembers else None
            self._books[bucket] = _Sums(zero, zero.copy(), law, record.given.dtype.itemsize)
        books = self._books[bucket]
        books.sent += record.sent
        books.mean += record.mean
        expected = np.zeros(0)
        if books.waiting is not None:
            expected = books.waiting.after(record.given, record.sent)
            residual = np.nan if record.residual is None else record.residual
            books.lost = float(np.max([books.lost, _largest(residual - expected)]))
        books.size += max(_largest(record.given), _largest(expected), _largest(record.sent))

    def difference(self) -> tuple[float, float]:
        """Return the worst violation of both laws on any rank, and its tolerance (collective)."""
        worst = self.verdict()
        return worst.difference, worst.allowed

    def verdict(self, more: Sequence[Violation] = ()) -> Violation:
        """Return the worst violation of both laws and of `more`, on any rank (collective)."""
        # An audit without any bucket fails, because the exchange must then have bypassed the
        # compressor.
        nothing = Violation(np.inf, 0.0, "the exchange has bypassed the compressor")
        violations = [*(self._violations() if self._books else [nothing]), *more]
        gathered = self.communicator.allgather(
            [tuple(violation) for violation in violations], "the audit"
        )
        return max(
            (
                Violation(*violation)
                for local_violations in gathered
                for violation in local_violations
            ),
            key=lambda violation: violation.excess,
        )

    def _violations(self) -> Iterator[Violation]:
        for number, books in sorted(self._books.items()):
            exact = TOLERANCE[max(books.itemsize, 4)] * max(books.size, 1e-3)
            shared = (
                self.communicator.allreduce_small(books.sent, "the audit") / self.communicator.size
            )
            summed = exact + 2 * self.rounding * books.size
            what = f"the mean of bucket {number} is not the mean of the values that ranks sent"
            yield Violation(_largest(shared - books.mean), summed, what)
            if books.waiting is not None:
                what = f"in bucket {number} a residual is not the gradient minus the values sent"
                yield Violation(books.lost, exact, what)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))
