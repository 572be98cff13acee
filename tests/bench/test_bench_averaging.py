"""The bench of averaging measures what it says, on a model of no size."""

from __future__ import annotations

import math

import pytest

from labkit.bench.averaging import measure


@pytest.mark.slow
def test_a_stream_says_what_it_hides_and_local_steps_what_they_add() -> None:
    rows = {(row["network"], row["what"]): row for row in measure(2, 1, "1GbE", width=8)}
    here = {name for network, name in rows if network is None}
    assert here == {"local", "averaging", "springs"}
    stream = rows["1GbE", "streamed"]
    waited = rows["1GbE", "waited for"]
    assert stream["delay"] >= 1
    assert math.isclose(stream["hidden"], 1 - stream["added_ms"] / waited["added_ms"])
    assert waited["added_ms"] == pytest.approx(
        waited["median_ms"] - rows["1GbE", "local"]["median_ms"]
    )
