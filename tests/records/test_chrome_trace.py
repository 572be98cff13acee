"""Test that a Chrome trace has every event, with names for ranks and lanes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from labkit.exchange.comm_thread import KINDS
from labkit.records.chrome_trace import chrome_trace

ROWS: list[dict[str, Any]] = [
    {"rank": rank, "kind": kind, "step": step, "bucket": bucket, "start": start, "stop": stop}
    for rank in (0, 1)
    for step in (3, 4)
    for kind, bucket, start, stop in [
        ("step", -1, 0.1 * step, 0.1 * step + 0.08),
        ("pack", 0, 0.1 * step + 0.01, 0.1 * step + 0.011),
        ("communicate", 0, 0.1 * step + 0.011, 0.1 * step + 0.03),
        ("wait", 0, 0.1 * step + 0.02, 0.1 * step + 0.03),
    ]
]


def test_the_trace_is_json_with_a_complete_event_for_every_row() -> None:
    trace = json.loads(json.dumps(chrome_trace(ROWS)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(ROWS)
    for event, row in zip(events, ROWS, strict=True):
        assert event["pid"] == row["rank"]
        assert event["cat"] == row["kind"]
        assert event["args"]["step"] == row["step"]
        assert abs(event["ts"] - 1e6 * row["start"]) < 1e-3  # microseconds
        assert abs(event["dur"] - 1e6 * (row["stop"] - row["start"])) < 1e-3
        assert event["dur"] >= 0
    assert {event["name"] for event in events} == {"step", "pack 0", "communicate 0", "wait 0"}


def test_every_rank_and_lane_has_a_name() -> None:
    events = chrome_trace(ROWS)["traceEvents"]
    lanes = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert lanes <= named
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}


def test_events_of_one_lane_do_not_partly_overlap() -> None:
    """Test that the step has its own lane: the format nests events of one lane."""
    events = [event for event in chrome_trace(ROWS)["traceEvents"] if event["ph"] == "X"]
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        span = (event["ts"], event["ts"] + event["dur"])
        lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    assert len(lanes) == 2 * 3
    for spans in lanes.values():
        ordered = sorted(spans)
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(ordered))


def test_all_kinds_have_a_lane() -> None:
    row = ROWS[0]
    for kind in KINDS:
        assert chrome_trace([row | {"kind": kind}])["traceEvents"][0]["cat"] == kind


def test_an_empty_timeline_is_a_valid_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_what_is_predicted_stands_in_lanes_of_its_own_beside_the_measured() -> None:
    rows = [ROWS[0] | {"kind": "predicted forward 0", "step": step} for step in (3, 4)]
    clocks = [{"rank": 1, "offset_s": 0.0, "within_s": 2e-5}]
    events = chrome_trace([*ROWS, *rows], clocks)["traceEvents"]
    lanes = {(e["pid"], e["tid"]) for e in events if e.get("cat") == "predicted forward 0"}
    assert lanes == {(0, 4), (0, 3)}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [named[0, lane] for lane in (3, 4)] == ["predicted, even steps", "predicted, odd steps"]
    assert (1, 3) not in named
    [label] = [e for e in events if e["name"] == "process_labels"]
    assert (label["pid"], label["args"]["labels"]) == (1, "clock 0 s ahead, ± 20 µs")


def test_what_stages_do_stands_in_the_lane_of_training() -> None:
    row = {"rank": 1, "kind": "forward 0", "step": 3, "bucket": 2, "start": 0.5, "stop": 0.75}
    [event] = [e for e in chrome_trace([row])["traceEvents"] if e["ph"] == "X"]
    assert (event["name"], event["tid"], event["dur"]) == ("forward 0 2", 1, 250_000)
