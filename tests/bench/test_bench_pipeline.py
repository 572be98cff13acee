"""Test the benchmark of pipelines on a tiny model."""

from __future__ import annotations

import pytest

from labkit.bench.pipeline import measure
from labkit.common.errors import InvalidInput


@pytest.mark.slow
def test_a_row_holds_the_speed_up_and_what_it_can_be_at_most() -> None:
    row, delayed = measure(2, ["1f1b", "delayed"], [2], width=8, depth=2, rows=4, repeats=2)
    assert row["case"] == "1f1b, m = 2"
    assert row["share"] == pytest.approx(row["speedup"] / row["at_most"])
    assert row["stage_ms"] == pytest.approx(row["one_ms"] / 4)
    assert delayed["case"] == "delayed gradients, K = 2"
    assert delayed["stage_ms"] == pytest.approx(delayed["one_ms"] / 2)
    assert {"bench", "what", "workers", "network", "clock", "median_ms", "bytes"} <= set(row)


def test_unknown_schedules_are_refused_before_engines_start() -> None:
    with pytest.raises(InvalidInput, match=r"schedule='gpip' is not known .*allowed: layerw"):
        measure(2, ["gpip"])
