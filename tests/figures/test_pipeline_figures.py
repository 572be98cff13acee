"""Test Gantt charts and animations of pipeline schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.figures.schedules.pipeline import ACTIONS, MESSAGE, pipeline_gantt, pipeline_steps
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import ScheduleTable, interleaved
from labkit.schedules.pipeline_stages import in_flight, ticks
from labkit.simulate.pipeline import simulate_pipeline

MS = 1e-3


def bars(figure: Any, action: str, place: int = 0) -> Any:
    name = ACTIONS[action][0]
    return [trace for trace in figure.data if trace.type == "bar" and trace.name == name][place]


def test_a_bar_a_computation_with_its_micro_batch_at_its_stage() -> None:
    figure = pipeline_gantt(simulate_pipeline(PIPELINE["gpipe"](2, 2), MS, 2 * MS, MS))
    forward = bars(figure, "forward")
    assert list(zip(forward.y, forward.text, forward.base, strict=True)) == [
        ("stage 0", "0", 0.0),
        ("stage 0", "1", 1.0),
        ("stage 1", "0", 1.0),
        ("stage 1", "1", 2.0),
    ]
    assert list(forward.x) == pytest.approx([1, 1, 1, 1])
    backward = bars(figure, "backward")
    assert list(backward.text) == ["1", "1", "0", "0"]
    assert list(backward.x) == pytest.approx([3, 3, 3, 3])
    assert list(figure.layout.yaxis.categoryarray) == ["stage 1", "stage 0"]
    assert figure.layout.xaxis.title.text == "time, ms"


def test_the_title_says_simulation_and_network() -> None:
    table = PIPELINE["1f1b"](2, 4)
    free = simulate_pipeline(table, MS, MS, MS)
    wired = simulate_pipeline(table, MS, MS, MS, network="1GbE", nbytes=1e4)
    said = pipeline_gantt(wired).layout.title.text
    assert said == "Pipeline · simulation · network 1GbE"
    assert "none (messages take no time)" in pipeline_gantt(free).layout.title.text
    both = pipeline_gantt([free, wired]).layout.title.text
    assert both.endswith("messages take no time), 1GbE (by schedule)")


def test_schedules_share_one_axis_of_time_and_say_their_bubble() -> None:
    shown = [
        simulate_pipeline(PIPELINE[name](4, 8), MS, MS, MS) for name in ("gpipe", "zero_bubble")
    ]
    figure = pipeline_gantt(shown)
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert figure.layout.xaxis2.matches == "x"
    assert "gpipe, 4 stages, 8 micro-batches: 33 ms; bubble 27.3% of the time" in figure.alt
    assert "zero_bubble, 4 stages, 8 micro-batches: 27 ms; bubble 11.1% of the time" in figure.alt


def test_the_parts_of_a_backward_differ_in_colour_and_the_legend_names_what_is_drawn() -> None:
    figure = pipeline_gantt(simulate_pipeline(PIPELINE["zero_bubble"](2, 2), MS, MS, MS))
    parts = [bars(figure, each).marker.color for each in ("backward_input", "backward_weight")]
    assert len(set(parts)) == 2
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert named == ["forward", "backward, input part", "backward, weight part"]


def test_later_chunks_of_a_rank_are_paler() -> None:
    figure = pipeline_gantt(simulate_pipeline(interleaved(2, 2, 3), MS, MS, MS))
    forward = bars(figure, "forward")
    shades = {
        stage // 2: shade
        for (stage, *_), shade in zip(forward.customdata, forward.marker.opacity, strict=True)
    }
    assert shades[0] == 1 > shades[1] > shades[2] > 0.4
    assert set(forward.y) == {"rank 0", "rank 1"}
    assert "6 stages on 2 ranks" in figure.alt


def test_messages_are_lines_from_sender_to_receiver_where_they_take_time() -> None:
    table = PIPELINE["gpipe"](2, 1)
    wired = pipeline_gantt(simulate_pipeline(table, MS, MS, network="100Mb", nbytes=12.5e3))
    (line,) = [trace for trace in wired.data if trace.name == MESSAGE[0] and trace.y[0]]
    assert list(line.y) == ["stage 0", "stage 1", None, "stage 1", "stage 0", None]
    assert line.x[0] == pytest.approx(1)
    assert line.x[1] == pytest.approx(1 + 1 + 0.17)
    free = pipeline_gantt(simulate_pipeline(table, MS, MS))
    assert not [trace for trace in free.data if trace.name == MESSAGE[0]]


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no pipeline was given"):
        pipeline_gantt([])


def tables() -> list[ScheduleTable]:
    return [*(make(3, 6) for make in PIPELINE.values()), interleaved(2, 4, 3)]


@pytest.mark.parametrize("table", tables(), ids=lambda table: table.name)
def test_ticks_hold_what_the_memory_formula_counts_and_send_what_the_table_sends(
    table: ScheduleTable,
) -> None:
    steps = ticks(table)
    held = np.array([[len(each) for each in step.held] for step in steps])
    by_rank = [held[:, rank :: table.ranks].sum(axis=1).max() for rank in range(table.ranks)]
    # The numbers hold at the end of a tick: a backward pass that has ended has freed its
    # activations.
    assert (np.array(by_rank) <= in_flight(table)).all()
    assert max(by_rank) == in_flight(table).max()
    assert not held[-1].any()
    sent = {each for step in steps for each in step.sent}
    rows = {
        (stage, peer, number) for _, stage, action, number, peer in table.rows() if action == "send"
    }
    assert rows <= sent
    assert all(abs(one - other) == 1 for one, other, _ in sent)
    assert sum(len(step.work) for step in steps) == table.computes.sum()


def heads(trace: Any) -> int:
    return int(np.count_nonzero(trace.marker.size)) if trace.marker.size else 0


def test_a_frame_a_tick_with_its_arrows_boxes_and_words() -> None:
    table = PIPELINE["1f1b"](2, 3)
    figure = pipeline_steps(table)
    assert [heads(trace) for trace in figure.frames[4].data[:2]] == [1, 1]
    assert [frame.name for frame in figure.frames] == [str(n + 1) for n in range(8)]
    forth, back, *boxes, held, caption = figure.frames[3].data
    assert (heads(forth), heads(back)) == (0, 0)
    assert [(list(box.x), list(box.text)) for box in boxes] == [
        ([1], ["<b>F1</b>"]),
        ([0], ["<b>B0</b>"]),
    ]
    assert list(held.text) == ["holds x1", "holds x1"]
    assert caption.text[0].startswith("tick 4 of 8: ")
    assert "1f1b, 2 stages, 3 micro-batches" in figure.layout.title.text
    assert "tick 8 of 8" in figure.alt
    table_rows = figure.layout.meta["table"]
    assert table_rows.count("<tr>") == 9
    assert "backward pass of 2" in table_rows


def test_what_is_too_large_to_see_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"at most 8 stages and 200 ticks.*pipeline_gantt"):
        pipeline_steps(PIPELINE["gpipe"](9, 2))
    with pytest.raises(InvalidInput, match="at most 8 stages"):
        pipeline_steps(PIPELINE["gpipe"](2, 150))
