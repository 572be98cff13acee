"""Test that the Gantt chart shows the recorded steps, and hidden time follows from its events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sample_runs import FAILED_GATE, write_run

from labkit.cli.app import app
from labkit.common.errors import InvalidInput, LabkitError
from labkit.figures import overlap, summarize_exchange, timeline
from labkit.figures.exchange.step_time import KINDS
from labkit.figures.kit.entries import PALETTE
from labkit.records.run import Run
from labkit.records.store import write_table

STEP, STEPS = 0.020, 24  # seconds per step; of 24 steps, the last 14 are steady
Event = tuple[str, int, float, float]  # kind, bucket, start and stop (ms after the step's start)

# Backpropagation ends at 10 ms; the network needs 4 ms for each of two buckets. SEQUENTIAL: compute
# 0–10, pack, wait 10–18 (one bucket of 8 ms). OVERLAP: bucket 0 is ready at 6 and bucket 1 at 10;
# they are sent at 6–10 and 10–14; wait 10–14. LATE: the same buckets are sent at 8–12 and 12–16,
# which saves half of what is possible.
SEQUENTIAL: list[Event] = [
    ("step", -1, 0, 19),
    ("pack", 0, 9.5, 10),
    ("communicate", 0, 10, 18),
    ("wait", 0, 10, 18),
]
OVERLAP: list[Event] = [
    ("step", -1, 0, 15),
    ("pack", 0, 5.5, 6),
    ("communicate", 0, 6, 10),
    ("pack", 1, 9.5, 10),
    ("wait", 0, 10, 10),
    ("communicate", 1, 10, 14),
    ("wait", 1, 10, 14),
]
LATE: list[Event] = [
    ("step", -1, 0, 17),
    ("pack", 0, 5.5, 6),
    ("communicate", 0, 8, 12),
    ("pack", 1, 9.5, 10),
    ("wait", 0, 10, 12),
    ("communicate", 1, 12, 16),
    ("wait", 1, 12, 16),
]


def rows(events: list[Event], ranks: int = 2, steps: int = STEPS) -> list[dict[str, Any]]:
    """Return rows in which every rank repeats the same step, with a pause of 1 s after step 16."""
    begins = [STEP * step + (1.0 if step > 16 else 0.0) for step in range(steps)]
    return [
        {
            "rank": rank,
            "kind": kind,
            "step": step,
            "bucket": bucket,
            "start": begin + start / 1e3,
            "stop": begin + stop / 1e3,
        }
        for rank in range(ranks)
        for step, begin in enumerate(begins)
        for kind, bucket, start, stop in events
    ]


def run(
    folder: Path, events: list[Event], schedule: str, measured: Any = None, **changes: Any
) -> Run:
    found = write_run(
        folder,
        network="1GbE",
        measured={"network": "1GbE"} | (measured or {}),
        strategy={"name": "AllReduce", "algorithm": "ring", "schedule": schedule},
        **changes,
    )
    write_table(found.path / "timeline.parquet", rows(events))
    return found


def bars(figure: Any, name: str, place: int = 0) -> Any:
    return [trace for trace in figure.data if trace.type == "bar" and trace.name == name][place]


def test_what_of_a_step_is_neither_pack_nor_wait_is_computation(tmp_path: Path) -> None:
    figure = timeline(run(tmp_path, OVERLAP, "overlap"), steps=[10])
    compute = bars(figure, "compute")
    first = [
        (round(start, 6), round(start + length, 6))
        for lane, start, length in zip(compute.y, compute.base, compute.x, strict=True)
        if lane == "rank 0 training"
    ]
    assert first == [(0, 5.5), (6, 9.5), (14, 15)]  # ms


def test_every_rank_has_a_lane_for_training_and_one_for_communication(tmp_path: Path) -> None:
    figure = timeline(run(tmp_path, OVERLAP, "overlap"))
    assert list(figure.layout.yaxis.categoryarray)[::-1] == [
        "rank 0 training",
        "rank 0 communication",
        "rank 1 training",
        "rank 1 communication",
    ]
    served = bars(figure, "communicate a bucket")
    assert set(served.y) == {"rank 0 communication", "rank 1 communication"}
    assert set(served.text) == {"0", "1"}
    assert set(bars(figure, "wait for a bucket").y) == {"rank 0 training", "rank 1 training"}
    assert "bucket %{customdata[1]" in served.hovertemplate
    assert figure.layout.xaxis.title.text == "time, ms"


def test_by_default_usual_steps_after_the_first_ten_are_drawn_and_no_pause(tmp_path: Path) -> None:
    figure = timeline(run(tmp_path, SEQUENTIAL, "sequential"))
    steps = {entry[0] for entry in bars(figure, "wait for a bucket").customdata}
    assert len(steps) == 3
    assert min(steps) >= 10
    assert not {16, 17} <= steps
    assert figure.layout.xaxis.range[1] < 100


def test_named_steps_are_drawn_and_others_refused(tmp_path: Path) -> None:
    found = run(tmp_path, SEQUENTIAL, "sequential")
    figure = timeline(found, steps=range(2, 4))
    assert {entry[0] for entry in bars(figure, "compute").customdata} == {2, 3}
    assert "steps 2 to 3: 19, 19 ms" in figure.alt
    with pytest.raises(InvalidInput, match=r"none of steps \[99\] is recorded; .* 0 to 23"):
        timeline(found, steps=[99])


def test_runs_share_one_scale_of_time_and_say_network_and_clock(tmp_path: Path) -> None:
    both = [run(tmp_path, SEQUENTIAL, "sequential"), run(tmp_path, OVERLAP, "overlap")]
    figure = timeline(both)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert figure.layout.xaxis2.matches == "x"
    assert figure.layout.title.text == "Timeline, 2 ranks · wall clock · network 1GbE"
    assert "schedule sequential: steps" in figure.alt
    assert "communication takes 8 ms per step, and training waits for it 4 ms" in figure.alt


def test_colours_are_those_that_all_eyes_tell_apart() -> None:
    colours = [kind.color for kind in KINDS.values()]
    assert len(set(colours)) == len(colours)
    assert set(colours) <= set(PALETTE)


def test_a_run_that_failed_its_gate_has_no_speed(tmp_path: Path) -> None:
    failed = run(tmp_path, OVERLAP, "overlap", {"equivalence": FAILED_GATE})
    figure = timeline(failed)
    assert not [trace for trace in figure.data if trace.type == "bar"]
    assert "no speed is shown, because the equivalence check failed" in figure.alt
    assert overlap(failed)["step_ms"].isna().all()
    assert "no speed is shown" in summarize_exchange(failed)


# --- what overlap hides --------------------------------------------------------------------------


def test_an_ideal_schedule_reaches_all_of_the_saving(tmp_path: Path) -> None:
    row = overlap(run(tmp_path, OVERLAP, "overlap")).iloc[0]
    assert row["communication_ms"] == pytest.approx(8)
    assert row["exposed_ms"] == pytest.approx(4)
    assert row["hidden_ms"] == pytest.approx(4)
    assert row["ideal_ms"] == pytest.approx(4)
    assert row["reached"] == pytest.approx(1)
    assert (row["steps"], row["buckets"]) == (14, 2)


def test_buckets_that_are_served_late_reach_half_of_it(tmp_path: Path) -> None:
    row = overlap(run(tmp_path, LATE, "overlap")).iloc[0]
    assert row["exposed_ms"] == pytest.approx(6)
    assert row["hidden_ms"] == pytest.approx(2)
    assert row["reached"] == pytest.approx(0.5)


def test_one_bucket_after_backpropagation_has_nothing_to_hide(tmp_path: Path) -> None:
    found = run(tmp_path, SEQUENTIAL, "sequential")
    row = overlap(found).iloc[0]
    assert row["exposed_ms"] == pytest.approx(8)
    assert row["ideal_ms"] == pytest.approx(0)
    assert row["reached"] != row["reached"]
    assert "no communication could be hidden" in summarize_exchange(found)


def test_waiting_for_a_slower_rank_is_no_communication(tmp_path: Path) -> None:
    """Rank 1 is 3 ms late, so both the thread and the training of rank 0 wait 3 ms longer."""
    found = run(tmp_path, SEQUENTIAL, "sequential")
    late = [
        row | {"start": row["start"] + shift, "stop": row["stop"] + shift}
        for row in rows(SEQUENTIAL)
        for shift in [0.003 if row["rank"] else 0.0]
    ]
    for row in late:
        if row["rank"] == 0 and row["kind"] in ("communicate", "wait"):
            row["stop"] += 0.003
    write_table(found.path / "timeline.parquet", late)
    row = overlap(Run(found.path)).iloc[0]
    assert row["communication_ms"] == pytest.approx(8)
    assert row["exposed_ms"] == pytest.approx(8)


def test_a_wait_of_the_next_step_counts_for_the_buckets_that_it_waits_for(tmp_path: Path) -> None:
    """With "priority", buckets are sent during the next forward pass, which waits for them."""
    events: list[Event] = [
        ("step", -1, 0, 19),
        ("wait", 1, 0, 2),  # belongs to the previous step
        ("wait", 0, 3, 6),
        ("pack", 0, 15.5, 16),
        ("pack", 1, 17.5, 18),
        ("communicate", 1, 18, 22),
        ("communicate", 0, 22, 26),
    ]
    found = run(tmp_path, [], "priority")
    table = [
        row
        for row in rows(events)
        if row["step"] < 12 + (row["kind"] == "wait") and (row["step"], row["kind"]) != (0, "wait")
    ]
    write_table(found.path / "timeline.parquet", table)
    row = overlap(Run(found.path)).iloc[0]
    assert row["communication_ms"] == pytest.approx(8)
    assert row["exposed_ms"] == pytest.approx(5)
    # Bucket 0, ready at 16, could be sent first (16–20), then bucket 1 (20–24); the next step would
    # wait 4 and 0 ms for them.
    assert row["ideal_ms"] == pytest.approx(4)


def test_two_waits_at_a_time_count_once(tmp_path: Path) -> None:
    both = [("wait", 0, 10, 14) if event[:2] == ("wait", 0) else event for event in OVERLAP]
    row = overlap(run(tmp_path, both, "overlap")).iloc[0]
    assert row["exposed_ms"] == pytest.approx(4)


def test_the_sequential_run_is_what_a_saving_is_held_against(tmp_path: Path) -> None:
    runs = [run(tmp_path, SEQUENTIAL, "sequential"), run(tmp_path, OVERLAP, "overlap")]
    table = overlap(runs)
    assert table["against_sequential_ms"].isna().tolist() == [True, False]
    assert table["against_sequential_ms"].iloc[1] == pytest.approx(4)  # 19 - 15
    other = run(tmp_path, OVERLAP, "overlap", batch_size=512)
    assert overlap([runs[0], other])["against_sequential_ms"].isna().all()


def test_the_reading_says_what_was_hidden_and_whether_it_paid(tmp_path: Path) -> None:
    runs = [run(tmp_path, SEQUENTIAL, "sequential"), run(tmp_path, LATE, "overlap")]
    said = summarize_exchange(runs)
    assert (
        "2 ms of communication are hidden behind computation; at most 4 ms could be hidden "
        "(50% reached)"
    ) in said
    assert (
        "its step is 2 ms shorter than the step of the sequential run, 50% of the ideal saving"
        in said
    )
    assert "The shortest step of these runs is that of **schedule overlap** (17 ms)" in said


# --- the trace -----------------------------------------------------------------------------------


def test_the_trace_of_a_run_holds_all_of_its_events(tmp_path: Path) -> None:
    found = run(tmp_path, OVERLAP, "overlap")
    path = found.export_trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * STEPS * len(OVERLAP)
    done = CliRunner().invoke(app, ["trace", str(found.path), "-o", str(tmp_path / "again.json")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_where_there_is_no_timeline_a_sentence_says_who_has_one(tmp_path: Path) -> None:
    alone = write_run(tmp_path, workers=1)
    for call in (lambda: alone.export_trace(tmp_path / "t.json"), lambda: timeline(alone)):
        with pytest.raises(LabkitError, match=r"has no timeline .*two or more workers"):
            call()
    assert not (tmp_path / "t.json").exists()
    done = CliRunner().invoke(app, ["trace", str(alone.path)])
    assert done.exit_code == 1
    assert "has no timeline" in done.output


def test_a_folder_of_several_runs_is_refused(tmp_path: Path) -> None:
    for schedule in ("sequential", "overlap"):
        run(tmp_path / "runs", OVERLAP, schedule)
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "runs")])
    assert done.exit_code == 2
    assert "contains 2 runs" in done.output
