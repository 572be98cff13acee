"""The Gantt shows the simulation as it is: a bar a computation, a line a message."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.common.errors import InvalidInput
from labkit.figures.schedules.pipeline import ACTIONS, MESSAGE, pipeline_gantt
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import interleaved
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
    assert "none: messages take no time" in pipeline_gantt(free).layout.title.text
    both = pipeline_gantt([free, wired]).layout.title.text
    assert both.endswith("messages take no time, 1GbE (by schedule)")


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
    with pytest.raises(InvalidInput, match="no pipeline to draw"):
        pipeline_gantt([])
