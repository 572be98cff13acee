"""Test figures of transports and of links between hosts; the rows are written by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import FAILED_GATE, write_run

from labkit import figures
from labkit.network import Network
from labkit.records.run import Run

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
    reading = figures.summarize_transport(ROWS, 4096, TRAINED)
    assert (
        f"Ratio of the two-sided to the one-sided time by {SHARED}, 4 KiB: 3.00 (spread 2.45 to "
        "3.67): it pays." in (reading)
    )
    assert "0.50 (spread 0.41 to 0.61): it does not pay." in reading
    assert "RDMA, predicted and not measured: **one_sided**, 100 µs." in reading


def test_the_reading_says_when_the_target_was_reached_and_where_it_was_not() -> None:
    reading = figures.summarize_transport(ROWS, 4096, TRAINED)
    assert "target accuracy 90% after 1.5 s." in reading
    assert "1.50 times the fastest; the target accuracy 90% was not reached." in reading
    table = figures.transport_training(TRAINED)
    assert table["time / fastest measured time"].tolist() == [1.0, 1.5]


def test_a_bar_a_way_reaches_as_far_as_its_step() -> None:
    bars = [each for each in figures.transport_steps(TRAINED).data if each["type"] == "bar"]
    assert sorted(float(value) for each in bars for value in each["x"]) == [2.0, 3.0]


def test_the_table_has_the_least_size_and_the_one_that_is_compared() -> None:
    table = figures.transport_table(ROWS, 4096)
    assert set(table["bytes"]) == {8, 4096}
    fastest = table[(table["bytes"] == 4096) & (table["place"] == SHARED)]
    assert fastest["time / fastest measured time"].tolist() == [1.0, 3.0]


KIB, MIB = 2**10, 2**20
LINK = Network(
    latency=1e-4, bandwidth=1e8, hosts=((0, 1), (2, 3)), host_latency=1e-5, host_bandwidth=1e10
)


def hosts_row(algorithm: str, nbytes: int, ms: float, ratio: float, **more: Any) -> dict[str, Any]:
    head = {"case": f"{algorithm} {nbytes} bytes", "network": "1Gb/s between 2 hosts", "workers": 4}
    times = {"median_ms": ms, "min_ms": 0.9 * ms, "p90_ms": 1.1 * ms, "correct": True}
    ratios = {"ratio": ratio, "ratio_min": 0.95 * ratio, "ratio_max": 1.05 * ratio}
    sent = {"link_bytes": nbytes, "wire_bytes": 6 * nbytes}
    found = {"predicted_ms": 0.9 * ms, "predicted_ratio": ratio, "predicted_link_bytes": nbytes}
    which = {"algorithm": algorithm, "bytes": nbytes, "other_mapping_ms": 2 * ms}
    return head | times | ratios | sent | found | which | more


UNKNOWN = dict.fromkeys(
    ("predicted_ms", "predicted_ratio", "predicted_link_bytes", "other_mapping_ms")
)
HOSTS_ROWS = [
    *(
        hosts_row("two_level", nbytes, ms, ratio)
        for nbytes, ms, ratio in ((64 * KIB, 1, 2), (MIB, 8, 2))
    ),
    *(hosts_row("ring", nbytes, ms, 1.0) for nbytes, ms in ((64 * KIB, 2.0), (MIB, 16.0))),
    *(hosts_row("tree", nbytes, ms, 0.5) for nbytes, ms in ((64 * KIB, 4.0), (MIB, 32.0))),
    hosts_row("mpi", 64 * KIB, 1.9, 1.01, **UNKNOWN),
    hosts_row("mpi", MIB, 15.8, 1.01, **UNKNOWN),
]


def trained(folder: Path, algorithm: str, median: float, **measured: Any) -> Run:
    strategy = {"name": "AllReduce", "algorithm": algorithm, "compressor": None}
    step = {"median": median, "p10": 0.9 * median, "p90": 1.2 * median}
    told = {"step_ms": step, **measured}
    return write_run(folder, algorithm, strategy=strategy, workers=4, measured=told)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [trained(tmp_path, "ring", 30.0), trained(tmp_path, "two_level", 20.0)]


def test_what_does_not_pay_is_told_first_with_its_ends(runs: list[Run]) -> None:
    said = figures.summarize_hosts(HOSTS_ROWS, LINK, runs).splitlines()
    assert "Speed-up of **tree** over ring, 1 MiB, predicted 0.50: 0.50 (" in said[0]
    assert [line.rpartition(": ")[2] for line in said[:4]] == [
        "it does not pay.",
        "no difference.",
        "it pays.",
        "it pays.",
    ]
    assert "Speed-up of **mpi** over ring, 1 MiB: 1.01 (spread 0.96 to 1.06)" in said[1]
    assert "Training step, speed-up of **two_level** over ring: 1.50 (" in said[3]
    assert "64 KiB: **two_level**, 1 ms (" in said[4]
    assert "tree takes 4.00 times the fastest" in said[4]


def test_a_sum_that_was_wrong_and_a_gate_that_failed_have_no_times(tmp_path: Path) -> None:
    wrong = [each | {"correct": each["algorithm"] != "two_level"} for each in HOSTS_ROWS]
    runs = [
        trained(tmp_path, "ring", 30.0),
        trained(tmp_path, "two_level", 20.0, equivalence=FAILED_GATE),
    ]
    said = figures.summarize_hosts(wrong, LINK, runs)
    assert "**two_level** over ring, 1 MiB: no time is shown, because the sums were wrong." in said
    assert (
        "of **two_level** over ring: no time is shown, because the equivalence check failed."
        in said
    )
    assert "nan" not in said


def test_bytes_stand_by_level_and_for_how_long_the_link_has_them() -> None:
    traffic = figures.hosts_traffic(HOSTS_ROWS, LINK).set_index("algorithm")
    assert traffic.loc["ring", "predicted time on the link, ms"] == pytest.approx(1e3 * MIB / 1e8)
    # On an emulated network, no bytes leave this host, so the schedule's number is used.
    pretended = [each | {"link_bytes": None} for each in HOSTS_ROWS]
    traffic = figures.hosts_traffic(pretended, LINK).set_index("algorithm")
    assert traffic.loc["ring", "predicted time on the link, ms"] == pytest.approx(1e3 * MIB / 1e8)


def test_a_way_inside_a_host_stands_beside_that_between_two() -> None:
    between, inside = figures.hosts_ways(LINK).to_dict("records")
    assert (between["latency"], inside["latency"]) == ("100 µs", "10 µs")
    assert (between["bandwidth"], inside["bandwidth"]) == ("800 Mb/s", "80 Gb/s")


def test_predicted_ratios_have_a_panel_that_says_so() -> None:
    figure = figures.hosts_speedup(HOSTS_ROWS).to_plotly_json()
    assert (
        "wall clock and simulation · network 1Gb/s between 2 hosts"
        in (figure["layout"]["title"]["text"])
    )
    said = " ".join(note["text"] for note in figure["layout"]["annotations"])
    assert "Measured" in said
    assert "Predicted, not measured" in said
    drawn = [trace["name"] for trace in figure["data"] if trace.get("name")]
    assert "ring" not in drawn
    assert {"mpi", "tree", "two_level"} <= set(drawn)
