"""Benchmarks of ranks on several hosts, on a testbed that they make: as parts of one command."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from labkit.bench.hosts import emulated, levels
from labkit.bench.timing import Row


class Part(NamedTuple):
    """A part: what measures it, in so many repeats, and the columns of its table.

    Raises, as it measures: LabkitError, where this machine can have no testbed.
    """

    measure: Callable[[int], list[Row]]
    columns: dict[str, str]


_TIMES = {"median_ms": "median ms", "min_ms": "least"}

PARTS = {
    "levels": Part(
        levels.measure,
        {"algorithm": "algorithm", "bytes": "bytes", **_TIMES, "max_ms": "most"}
        | {"ratio_to_ring": "of ring's time", "ratio_min": "least", "ratio_max": "most"}
        | {"predicted_ms": "predicted ms", "predicted_ratio": "of ring's"}
        | {"link_bytes": "bytes out of a host", "sent": "by its link", "correct": "correct"},
    ),
    "emulated": Part(
        emulated.measure,
        {"algorithm": "algorithm", "bytes": "bytes", "median_ms": "real ms"}
        | {"emulated_ms": "emulated ms", "error": "error", "error_min": "least"}
        | {"error_max": "most", "correct": "correct"},
    ),
}
