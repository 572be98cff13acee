"""The conservation law of lossy compression: what a rank does not send stays in its residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from labkit.communicator import Communicator
from labkit.compression.compressor import ExpectedResidual
from labkit.exchange import BucketLayer, ReductionRecord

# The allowed rounding error, relative to the sum over all steps of each step's largest value; the
# keys are the sizes of floats in bytes.
TOLERANCE = {4: 1e-5, 8: 1e-12}


class Violation(NamedTuple):
    """A conservation law's violation, its allowed size due to rounding, and a description."""

    difference: float
    allowed: float
    what: str

    @property
    def excess(self) -> float:
        """The violation divided by the allowed rounding error; infinity if the violation is NaN."""
        finite = self.allowed and np.isfinite(self.difference)
        return self.difference / self.allowed if finite else np.inf


@dataclass
class _Sums:
    """Sums, over all training steps, of what was sent and received in one bucket, in float64."""

    sent: np.ndarray
    mean: np.ndarray
    waiting: ExpectedResidual | None
    itemsize: int
    size: float = 0.0  # sum over all steps of the largest absolute value
    lost: float = 0.0  # largest violation of the residual's law in any step


@dataclass
class Audit:
    r"""Verify each bucket of a compressed gradient exchange by two conservation laws.

    The conservation law of the residual holds on each rank after every step. The residual is the
    sum of gradients minus the sum of values sent (see `ExpectedResidual`), \(e_T = \sum_t g_t -
    \sum_t s_t\). For DGC (deep gradient compression), the velocities obey a law of the same form.
    The conservation law of the mean gradients holds over all ranks together. The sum of the mean
    gradients equals the mean over the ranks of the sums of values sent, \(\frac1n \sum_r \sum_t
    s_{r,t} = \sum_t \hat g_t\).

    Both conservation laws hold up to rounding errors. The law about mean gradients also allows
    rounding errors in the sum of compressed values.

    Args:
        communicator: Communicator of the ranks that exchange gradients.
        remembers: Whether the compressor stores a residual; if so, the conservation law of the
            residual applies.
        rounding: Relative rounding error of a sum of compressed values.
        law: Function that creates the object which computes the expected residual of a bucket.
    """

    communicator: Communicator
    remembers: bool
    rounding: float = 0.0
    law: Callable[[], ExpectedResidual | None] = ExpectedResidual
    _books: dict[int, _Sums] = field(default_factory=dict)

    def observe(self, bucket: int, layers: Sequence[BucketLayer], record: ReductionRecord) -> None:
        """Add a bucket's values of one step to its sums; `Exchange` calls `observe` per bucket."""
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
        """Return the worst violation of a law on any rank, and its tolerance (collective)."""
        worst = self.verdict()
        return worst.difference, worst.allowed

    def verdict(self, more: Sequence[Violation] = ()) -> Violation:
        """Return the worst violation of a law on any rank, `more` included (collective)."""
        # If no bucket was observed, the audit fails, because the exchange must have bypassed the
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
