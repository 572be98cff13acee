"""The live figure holds what has come, thinned, and names its axes with units."""

from __future__ import annotations

import math
from typing import Any

import pytest

from labkit.figures.runs.interactive import MOST, PARTS, Curve, LiveFigure


def row(rank: int, step: int, loss: float = 1.0) -> dict[str, Any]:
    plain = {"rank": rank, "step": step, "loss": loss, "seconds": 0.5, "samples": 4}
    return plain | {"wire_bytes": 2**20}


def traces(figure: LiveFigure, what: str) -> list[Any]:
    data = figure.screen.content["data"]
    return [trace for trace in data if trace.get("meta", [""])[0] == what]


def test_the_curves_of_each_rank_grow() -> None:
    figure = LiveFigure("mine", 2)
    figure.add([row(rank, 0, 2.0) for rank in range(2)], [], {})
    figure.add([row(rank, 1, 1.0) for rank in range(2)], [], {})
    for trace in traces(figure, "loss"):
        assert (trace["x"], trace["y"]) == ([1, 2], [2.0, 1.0])
    for trace in traces(figure, "speed"):
        assert trace["y"] == [8.0, 8.0]
    for trace in traces(figure, "sent"):
        assert trace["y"] == [1.0, 2.0]


def test_a_rank_without_loss_and_samples_has_no_points_there() -> None:
    figure = LiveFigure("mine", 1)
    figure.add([row(0, 0, math.nan) | {"samples": 0}], [], {})
    assert not traces(figure, "loss")[0]["x"]
    assert not traces(figure, "speed")[0]["x"]
    assert traces(figure, "sent")[0]["y"] == [1.0]


def test_metrics_get_curves_when_they_come() -> None:
    figure = LiveFigure("mine", 1)
    assert traces(figure, "metric") == []
    epoch = {"epoch": 0, "step": 12, "seconds": 1.0, "loss": 1.0, "val_loss": 2.0}
    figure.add([], [epoch | {"accuracy": 0.5, "val_accuracy": 0.25}], {})
    found = {trace["name"]: (trace["x"], trace["y"]) for trace in traces(figure, "metric")}
    assert found == {
        "accuracy": ([12], [0.5]),
        "held-out accuracy": ([12], [0.25]),
        "held-out loss": ([12], [2.0]),
    }
    held_out = next(t for t in traces(figure, "metric") if t["name"] == "held-out loss")
    assert held_out["xaxis"] == "x"  # beside the loss, not the metrics


def test_bars_say_which_part_of_its_time_each_rank_spends_on_what() -> None:
    figure = LiveFigure("mine", 2)
    shares = {0: dict(zip(PARTS, (0.5, 0.0, 0.25, 0.25), strict=True))}
    figure.add([], [], shares)
    bars = [trace for trace in figure.screen.content["data"] if trace["type"] == "bar"]
    assert {trace["name"]: trace["x"] for trace in bars} == {
        "compute": [50, 0],
        "codec": [0, 0],
        "communicate": [25, 0],
        "wait": [25, 0],
    }
    patterns = {trace["marker"]["pattern"]["shape"] for trace in bars}
    assert len(patterns) == len(bars)  # told apart without colour


def test_axes_have_units() -> None:
    layout = LiveFigure("mine", 1).screen.content["layout"]
    titles = [layout[f"yaxis{end}"]["title"]["text"] for end in ("", "2", "3", "4")]
    assert titles == [
        "loss of the rank's batch",
        "metrics after an epoch",
        "samples/s of the rank",
        "MiB sent by the rank",
    ]
    assert layout["xaxis"]["title"]["text"] == "step"
    assert layout["xaxis5"]["title"]["text"].startswith("% of its time")


def title(figure: LiveFigure) -> str:
    return str(figure.screen.content["layout"]["title"]["text"])


def test_the_title_says_on_which_clock_seconds_are() -> None:
    assert title(LiveFigure("mine", 1)) == "mine · wall clock"
    assert title(LiveFigure("mine", 1, "virtual")) == "mine · virtual clock"


def test_a_label_with_tags_is_text() -> None:
    assert "&lt;script&gt;" in title(LiveFigure("<script>", 1))


def test_a_long_curve_keeps_its_shape_in_few_points() -> None:
    curve = Curve()
    count = 10 * MOST
    for step in range(count):
        curve.add(step, 2.0 * step)
    assert MOST / 2 <= len(curve.x) < MOST
    assert curve.y == pytest.approx([2 * x for x in curve.x])
    assert curve.x == sorted(curve.x)
    assert curve.x[0] < curve.each
    assert curve.x[-1] > count - 2 * curve.each
