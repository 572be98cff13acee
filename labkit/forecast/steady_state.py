"""Detection of a steady state in a run of programs: two consecutive cycles are equal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.programs.event_log import Row

SAME = 1e-11  # relative tolerance of times, larger than the rounding errors of a few sums
COMPARED = (
    *("seconds", "compute_seconds", "codec_seconds", "communicate_seconds", "wait_seconds"),
    *("payload_bytes", "wire_bytes", "messages"),
)


class SteadyStateDetector:
    """A detector of the steady state in a run without random times.

    The detector compares the last two cycles of each worker, step by step, in time and in traffic.
    If all cycles are equal, and no worker is a cycle ahead, all messages in transit were sent in
    these two cycles. In this case, all later cycles repeat the last cycle and need not be
    simulated.

    Args:
        workers: Number of simulated workers.
        cycle: Number of steps after which the communication pattern repeats.
        most: Number of cycles after which the detector gives up.

    Attributes:
        cycles: Number of cycles from the start of the run to the end of the two compared cycles.
    """

    def __init__(self, workers: int, cycle: int, most: int) -> None:
        self.cycles = 2
        self._workers, self._cycle, self._most = workers, cycle, most

    def reached(self, rows: Sequence[tuple[float, Row]]) -> bool:
        """Return whether the run is steady, from history rows and their end times (s)."""
        steps = self.cycles * self._cycle
        if self.cycles > self._most or len(rows) < steps * self._workers:
            return False
        rows_of_worker: list[list[tuple[float, Row]]] = [[] for _ in range(self._workers)]
        for row in rows:
            rows_of_worker[int(row[1]["rank"])].append(row)
        if min(map(len, rows_of_worker)) < steps:
            return False  # some workers have not completed the compared cycles
        compared = [worker_rows[steps - 2 * self._cycle : steps] for worker_rows in rows_of_worker]
        is_steady = self._equal_cycles(compared)
        self.cycles += not is_steady
        return is_steady

    def _equal_cycles(self, compared: Sequence[Sequence[tuple[float, Row]]]) -> bool:
        """Return whether two cycles are equal, given end times and history rows of all steps."""
        shape = self._workers, 2, self._cycle, len(COMPARED)
        values = [
            [row[name] for name in COMPARED] for worker_rows in compared for _, row in worker_rows
        ]
        first, second = np.moveaxis(np.array(values).reshape(shape), 1, 0)
        ends = np.array([worker_rows[-1][0] for worker_rows in compared])  # s, shape (workers,)
        durations = second[:, :, 0].sum(1)
        tolerance = SAME * float(ends.max())
        equal = np.allclose(first, second, rtol=SAME, atol=tolerance)
        return bool(
            equal and np.ptp(durations) <= tolerance and np.ptp(ends) <= durations[0] + tolerance
        )
