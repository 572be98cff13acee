"""Test the benchmark of weight averaging on a tiny model."""

from __future__ import annotations

import pytest

from labkit.bench.averaging import measure


@pytest.mark.slow
def test_a_stream_says_what_it_hides_and_local_steps_what_they_add() -> None:
    rows = {(row["network"], row["what"]): row for row in measure(2, 1, "1GbE", width=8)}
    here = {name: row for (network, name), row in rows.items() if network is None}
    assert here.keys() == {"local", "averaging", "springs", "codistillation"}
    for name, row in here.items():
        assert name == "local" or row["ratio"] > 0 < row["own_ms"] < row["median_ms"]
    local, waited, late = (rows["1GbE", name] for name in ("local", "waited for", "streamed"))
    for each in (waited, late):
        assert each["added_ms"] == pytest.approx(each["median_ms"] - local["median_ms"])
    assert late["hidden"] == pytest.approx(1 - late["added_ms"] / waited["added_ms"])
    # The overlapped steps last 1.5 times as long as the communication, but there is at least one.
    assert late["delay"] >= 1
    assert late["wire_ms"] > 0
