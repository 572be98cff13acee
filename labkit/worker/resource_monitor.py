"""Samples of the processor time, memory and network traffic of a rank during training."""

from __future__ import annotations

import threading
from typing import Self

import psutil

from labkit.communicator.clock import WALL

INTERVAL = 1.0  # seconds between two samples of a short training
# A monitor keeps at most MOST samples. In a longer training, samples are further apart.
MOST = 600


class ResourceMonitor:
    """A thread that samples what this process uses, while a context lasts.

    Columns of a sample: `seconds` since the start of training, `cpu_seconds` of all threads of the
    process, `memory_bytes` (resident), and `sent_bytes` and `received_bytes`. All columns but the
    memory are totals since the start, so that no sample depends on the distance to another one. The
    traffic is that of the whole host over all network interfaces but loopback. The samples describe
    the machine, so `seconds` are those of the wall clock, even in a run on the virtual clock.
    """

    def __init__(self, interval: float = INTERVAL, most: int = MOST) -> None:
        self.rows: list[dict[str, float]] = []
        self._interval, self._most = interval, most
        self._process, self._ended = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._sample_often, daemon=True)

    def __enter__(self) -> Self:
        self._begin = WALL.now()
        self._first = self._totals()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _sample_often(self) -> None:
        while not self._ended.wait(self._interval):
            self._sample()
            if len(self.rows) >= self._most:
                del self.rows[1::2]
                self._interval *= 2

    def _sample(self) -> None:
        totals = {name: value - self._first[name] for name, value in self._totals().items()}
        memory = self._process.memory_info().rss
        seconds = WALL.now() - self._begin
        self.rows.append({"seconds": seconds, "memory_bytes": memory, **totals})

    def _totals(self) -> dict[str, float]:
        used = self._process.cpu_times()
        interfaces = psutil.net_io_counters(pernic=True)
        others = [counts for name, counts in interfaces.items() if not name.startswith("lo")]
        return {
            "cpu_seconds": used.user + used.system,
            "sent_bytes": sum(counts.bytes_sent for counts in others),
            "received_bytes": sum(counts.bytes_recv for counts in others),
        }
