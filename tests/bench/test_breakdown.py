"""Test the breakdown of the time that a gradient exchange adds, from two ranks' timelines."""

from __future__ import annotations

import pytest

from labkit.bench.exchange import HANDED, breakdown_rows, phase_medians

# The fields are kind, step, bucket, start and stop; rank 1 packs later, and rank 0 waits for rank
# 1.
FIRST = [("pack", 3, 0, 1.0, 1.2), ("communicate", 3, 0, 1.2, 2.0), ("step", 3, 0, 0.0, 2.5)]
OTHER = [("pack", 3, 0, 1.1, 1.6), ("communicate", 3, 0, 1.6, 2.1), ("step", 3, 0, 0.0, 2.5)]
BEFORE = [("pack", 3, 0, 0.0, 0.9), ("communicate", 3, 0, 0.9, 0.95)]


def test_lines_are_of_the_rank_for_which_all_wait() -> None:
    found = phase_medians([BEFORE + FIRST, BEFORE + OTHER], steps=1)
    assert found == pytest.approx({"pack": 0.5, "sum": 0.5, "wait": 0.2})


def test_lines_add_up_to_what_is_added_and_stand_beside_their_limits() -> None:
    seconds = {"copy": [0.3, 0.4], "raw allreduce": [0.2]}
    found = dict(
        breakdown_rows(
            phase_medians([FIRST, OTHER], 1),
            seconds,
            {HANDED: [0.1], "sequential": [1.3]},
            "sequential",
        )
    )
    lines = {line: row["median_ms"] for line, row in found.items()}
    parts = ("pack", "sum", "pass gradients from TensorFlow and back", "other")
    assert sum(lines[f"where: {part}"] for part in parts) == pytest.approx(1300)
    assert lines["where: other"] == pytest.approx(200)
    assert found["where: pack"]["limit_ms"] == pytest.approx(350)
    assert found["where: sum"]["limit_ms"] == pytest.approx(200)
