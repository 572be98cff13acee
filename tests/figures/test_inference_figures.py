"""Test figures and summaries of inference by replicas, pipeline stages and tensor slices."""

from __future__ import annotations

import pytest

from labkit.figures import serving, summarize_serving
from labkit.records.analysis.serving_runs import (
    ONE_PROCESS,
    ServingMeasurements,
    serving_measurements,
)

NETWORKS, SIZES = ("near", "far"), (1, 8)
# Milliseconds per batch of 1 and of 8, by kind of inference; on the far network, divided models
# take longer.
LATENCY = {
    ONE_PROCESS: (2.0, 9.0),
    "replicas": (2.0, 5.0),
    "stages": (3.0, 10.0),
    "slices": (1.0, 6.0),
}


def measured(**changes: int) -> ServingMeasurements:
    times = [
        {
            "network": network,
            "way": way,
            "batch_size": size,
            "what": what,
            "rows": size * (4 if what == "stream" else 1),
            "seconds": 1e-3 * ms * more * (10 if what == "first" else 1),
        }
        for network, slower in zip(NETWORKS, (0.0, 20.0), strict=True)
        for way, each in LATENCY.items()
        for size, base in zip(SIZES, each, strict=True)
        for ms in [base + slower * (way != ONE_PROCESS)]
        for what, turns in (("first", 1), ("batch", 5), ("stream", 3))
        for more in [1 + 0.01 * turn for turn in range(turns)]
    ]
    held = [{ONE_PROCESS: 800, "replicas": 800, "stages": 500, "slices": 400}]
    held.append({ONE_PROCESS: 0, "replicas": 800, "stages": 300, "slices": 400})
    far = {"replicas": 0.0, "stages": 1e-7, "slices": 2e-7}
    known = {"workers": 2, "threads": 1, "cores": 2} | changes
    return serving_measurements(times, held, far, 1e-4, under_way=4, **known)


def test_latency_is_a_median_with_its_percentiles_and_the_first_call_apart() -> None:
    table = measured().latency().set_index(["network", "way", "batch_size"])
    row = table.loc["near", "slices", 8]
    assert row["latency_ms"] == pytest.approx(6.0 * 1.02)
    assert row["latency_ms_low"] == pytest.approx(6.0 * 1.004)
    assert row["latency_ms_high"] == pytest.approx(6.0 * 1.036)
    assert row["first_ms"] == pytest.approx(60.0)
    assert row["of_one_process"] == pytest.approx(6 / 9)
    assert len(table) == len(NETWORKS) * len(LATENCY) * len(SIZES)


def test_throughput_counts_the_rows_of_a_stream() -> None:
    table = measured().throughput().set_index(["network", "way", "batch_size"])
    row = table.loc["near", "replicas", 8]
    assert row["rows_per_second"] == pytest.approx(4 * 8 / 5.05e-3)
    assert row["rows_per_second_high"] == pytest.approx(4 * 8 / 5e-3)
    assert row["rows_per_second_low"] == pytest.approx(4 * 8 / 5.1e-3)


def test_memory_is_what_each_rank_holds_and_one_process_is_one() -> None:
    table = measured().memory()
    assert list(table.index) == list(LATENCY)
    assert table.loc["stages", "most_weights_bytes"] == 500
    assert table.loc["slices", "share"] == 0.5
    assert table["rank 1, weights_bytes"].isna().tolist() == [True, False, False, False]


def test_the_reading_says_who_is_ahead_and_where_slicing_pays() -> None:
    said = summarize_serving(measured()).splitlines()
    assert said[0] == (
        "- Lowest latency with batches of 1 row, near: **slices**, 1.02 ms (spread 1.00 ms to "
        "1.04 ms); next one process, 2.04 ms: better than all other strategies beyond the spread."
    )
    assert said[1].startswith(
        "- Lowest latency with batches of 1 row, far: **one process**, 2.04 ms"
    )
    assert "**replicas**, 6,337 rows/s" in said[2]
    assert "with batches of 8; next slices, 5,281 rows/s" in said[2]
    assert said[4].endswith(
        "(with batches of 1): slicing the model reduces latency with batches of 1, 8."
    )
    assert said[5].endswith(
        "slicing the model reduces latency for no batch size beyond the spread."
    )
    assert "one process 800 B, replicas 800 B, stages 500 B, slices 400 B" in said[6]
    assert (
        "the largest difference of a prediction is 2.0e-07; rounding explains up to 1.0e-04"
        in said[7]
    )
    assert said[8].endswith("near: slices and replicas; far: one process and one process.")
    assert len(said) == 9


def test_equal_ways_are_not_ranked() -> None:
    found = measured()
    slow = found.times["way"].isin(["slices", "stages"])
    found.times.loc[slow, "seconds"] *= 100
    first, *_, last = summarize_serving(found).splitlines()
    assert first.endswith("(spread 2.01 ms to 2.07 ms); next replicas, 2.04 ms: spreads overlap.")
    assert "near: no clear winner and " in last


def test_more_ranks_than_cores_are_marked_in_figure_and_words() -> None:
    many = measured(threads=2)
    assert "need more cores than the host has" in summarize_serving(many)
    assert "2 ranks × 2 threads *" in serving(many).alt
    assert "than cores" in serving(many).alt
    assert "than cores" not in serving(measured()).alt


def test_the_figure_has_a_panel_a_network_for_latency_and_for_throughput() -> None:
    figure = serving(measured())
    titles = [note.text for note in figure.layout.annotations]
    assert [sum(network in title for title in titles) for network in NETWORKS] == [2, 2]
    assert figure.layout.title.text == "Parallel inference · 2 ranks × 1 thread · wall clock"
    drawn = [t for t in figure.data if t.mode == "lines+markers" and t.x[0] is not None]
    assert len(drawn) == 4 * len(LATENCY)
    assert "far, stages, batches of 1: 23.46 ms" in figure.alt
