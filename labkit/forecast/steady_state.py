"""When a play goes on as it does: two cycles after one another were alike for everybody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.programs.event_log import Row

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
        most: cycles, from the begin, after which nobody looks any more.

    Attributes:
        cycles: from the begin to the end of the two that are looked at.
    """

    def __init__(self, workers: int, cycle: int, most: int) -> None:
        self.cycles = 2
        self._workers, self._cycle, self._most = workers, cycle, most

    def reached(self, rows: Sequence[tuple[float, Row]]) -> bool:
        """Whether it is so, by steps and when each was over (s)."""
        steps = self.cycles * self._cycle
        if self.cycles > self._most or len(rows) < steps * self._workers:
            return False
        own: list[list[tuple[float, Row]]] = [[] for _ in range(self._workers)]
        for row in rows:
            own[int(row[1]["rank"])].append(row)
        if min(map(len, own)) < steps:
            return False  # somebody is behind, and others ahead
        looked = [each[steps - 2 * self._cycle : steps] for each in own]
        found = self._alike(looked)
        self.cycles += not found
        return found

    def _alike(self, looked: Sequence[Sequence[tuple[float, Row]]]) -> bool:
        """Whether two cycles are, by the steps of each worker."""
        shape = self._workers, 2, self._cycle, len(WRITTEN)
        written = [[row[name] for name in WRITTEN] for each in looked for _, row in each]
        before, now = np.moveaxis(np.array(written).reshape(shape), 1, 0)
        ends = np.array([each[-1][0] for each in looked])  # s; (workers,)
        lasted = now[:, :, 0].sum(1)
        close = SAME * float(ends.max())
        alike = np.allclose(before, now, rtol=SAME, atol=close)
        return bool(alike and np.ptp(lasted) <= close and np.ptp(ends) <= lasted[0] + close)
