"""Figures of one exchange by several ways: places apart, what is predicted marked, gains."""

from __future__ import annotations

from typing import Any

import pytest

from labkit import figures

SHARED, LOOPBACK, RDMA = "shared memory", "TCP on loopback", "RDMA, predicted"


def row(transport: str, place: str, nbytes: int, ms: float, **more: Any) -> dict[str, Any]:
    measured = {"network": None, "clock": "wall", "processor_ns": 0.5, "tcp": 0.0}
    times = {"median_ms": ms, "min_ms": 0.9 * ms, "p90_ms": 1.1 * ms}
    which = {"case": f"{transport}, {place}", "transport": transport, "place": place}
    copies = {"what": "exchange", "bytes": nbytes, "repeats": 3, "copies": 1, "copied": "the put"}
    return which | measured | times | copies | {"bandwidth": 1e3 * nbytes / ms} | more


ROWS = [
    *(row("one_sided", SHARED, nbytes, ms) for nbytes, ms in ((8, 0.01), (4096, 1.0))),
    *(row("two_sided", SHARED, nbytes, ms) for nbytes, ms in ((8, 0.02), (4096, 3.0))),
    *(row("one_sided", LOOPBACK, nbytes, ms) for nbytes, ms in ((8, 0.09), (4096, 6.0))),
    *(row("two_sided", LOOPBACK, nbytes, ms) for nbytes, ms in ((8, 0.05), (4096, 3.0))),
    row("one_sided", RDMA, 4096, 0.1, clock="simulation", network="100Gb-infiniband"),
]
TRAINED = [
    row(name, SHARED, 9, ms, what="training step", target=0.9, accuracy=0.95, seconds_to_target=s)
    for name, ms, s in (("one_sided", 2.0, 1.5), ("two_sided", 3.0, None))
]


def test_each_place_has_a_panel_and_what_is_predicted_says_so() -> None:
    figure = figures.transport_times(ROWS)
    layout = figure.to_plotly_json()["layout"]
    assert "wall clock and simulation, not measured" in layout["title"]["text"]
    said = " ".join(note["text"] for note in layout["annotations"])
    assert all(place in said for place in (SHARED, LOOPBACK, RDMA))
    assert "simulation, not measured" in said


def test_a_gain_is_told_place_by_place_with_its_ends() -> None:
    gains = figures.transport_gains(ROWS, 4096).set_index("place")
    assert gains["ratio"].to_dict() == {SHARED: pytest.approx(3.0), LOOPBACK: pytest.approx(0.5)}
    assert gains.loc[SHARED, "low"] == pytest.approx(2.7 / 1.1)
    reading = figures.transport_reading(ROWS, 4096, TRAINED)
    assert f"Two-sided over one-sided by {SHARED}, 4 KiB: 3.00 (spread 2.45 to 3.67): it pays." in (
        reading
    )
    assert "0.50 (spread 0.41 to 0.61): it does not pay." in reading
    assert "RDMA, predicted and not measured: **one_sided**, 100 µs." in reading


def test_the_reading_says_when_the_target_was_reached_and_where_it_was_not() -> None:
    reading = figures.transport_reading(ROWS, 4096, TRAINED)
    assert "90% of held-out rows after 1.5 s." in reading
    assert "1.50 times the fastest; 90% of held-out rows were not reached." in reading
    table = figures.transport_training(TRAINED)
    assert table["times the fastest measured"].tolist() == [1.0, 1.5]


def test_a_bar_a_way_reaches_as_far_as_its_step() -> None:
    bars = [each for each in figures.transport_steps(TRAINED).data if each["type"] == "bar"]
    assert sorted(float(value) for each in bars for value in each["x"]) == [2.0, 3.0]


def test_the_table_has_the_least_size_and_the_one_that_is_compared() -> None:
    table = figures.transport_table(ROWS, 4096)
    assert set(table["bytes"]) == {8, 4096}
    fastest = table[(table["bytes"] == 4096) & (table["place"] == SHARED)]
    assert fastest["times the fastest measured"].tolist() == [1.0, 3.0]
