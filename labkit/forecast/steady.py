"""When a play goes on as it does: two cycles after one another were alike for everybody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.programs.diary import Row

SAME = 1e-11  # relative, of moments: more than sums of a few steps are rounded
WRITTEN = (
    *("seconds", "compute_seconds", "codec_seconds", "communicate_seconds", "wait_seconds"),
    *("payload_bytes", "wire_bytes", "messages"),
)


class Steady:
    """Watches a play in which everything depends on nothing but when workers began their steps.

    Where the last two cycles of each worker are alike step by step, in time and in what it sent,
    all of them have lasted equally long, and nobody is a cycle ahead of another, all that is under
    way was sent within these cycles, as it was a cycle earlier. What comes then is what came, a
    cycle later: it need not be played.

    Args:
        workers: how many are played.
        cycle: steps after which what they exchange begins anew.

    Attributes:
        cycles: those that are looked at next, counted from the begin.
    """

    def __init__(self, workers: int, cycle: int) -> None:
        self.cycles = 2
        self._workers, self._cycle = workers, cycle

    def reached(self, rows: Sequence[tuple[float, Row]]) -> bool:
        """Whether it is so, by steps and when each was over (s)."""
        steps = self.cycles * self._cycle
        if len(rows) < steps * self._workers:
            return False
        own: list[list[tuple[float, Row]]] = [[] for _ in range(self._workers)]
        for row in rows:
            own[int(row[1]["rank"])].append(row)
        if min(map(len, own)) < steps:
            return False  # somebody is behind, and others ahead
        self.cycles += 1
        ends = np.array([each[steps - 1][0] for each in own])
        shape = self._workers, 2, self._cycle, len(WRITTEN)
        looked = [row for each in own for _, row in each[steps - 2 * self._cycle : steps]]
        before, now = np.moveaxis(
            np.array([[row[name] for name in WRITTEN] for row in looked]).reshape(shape), 1, 0
        )
        lasted = now[:, :, 0].sum(1)  # (workers,)
        close = SAME * float(ends.max())
        alike = np.allclose(before, now, rtol=SAME, atol=close)
        return bool(alike and np.ptp(lasted) <= close and np.ptp(ends) <= lasted[0] + close)
