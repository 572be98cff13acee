"""Test live curves and linked selections of runs, without a browser."""

from __future__ import annotations

import math
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from labkit.common.errors import InvalidInput
from labkit.figures import compare, linked_selection, pareto
from labkit.figures.kit.entries import entries
from labkit.figures.runs.interactive import MOST, PARTS, LiveCurve, LiveFigure


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
    assert held_out["xaxis"] == "x"  # in the panel of the loss, not that of the metrics


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
    assert len(patterns) == len(bars)  # patterns distinguish the bars without colour


def test_axes_have_units() -> None:
    layout = LiveFigure("mine", 1).screen.content["layout"]
    titles = [layout[f"yaxis{end}"]["title"]["text"] for end in ("", "2", "3", "4")]
    assert titles == [
        "loss of the batch of a rank",
        "metrics after each epoch",
        "samples/s of a rank",
        "MiB sent by a rank",
    ]
    assert layout["xaxis"]["title"]["text"] == "step"
    assert layout["xaxis5"]["title"]["text"].startswith("% of step time")


def title(figure: LiveFigure) -> str:
    return str(figure.screen.content["layout"]["title"]["text"])


def test_the_title_says_on_which_clock_seconds_are() -> None:
    assert title(LiveFigure("mine", 1)) == "mine · wall clock"
    assert title(LiveFigure("mine", 1, "virtual")) == "mine · virtual clock"


def test_a_label_with_tags_is_text() -> None:
    assert "&lt;script&gt;" in title(LiveFigure("<script>", 1))


def test_a_long_curve_keeps_its_shape_in_few_points() -> None:
    curve = LiveCurve()
    count = 10 * MOST
    for step in range(count):
        curve.add(step, 2.0 * step)
    assert MOST / 2 <= len(curve.x) < MOST
    assert curve.y == pytest.approx([2 * x for x in curve.x])
    assert curve.x == sorted(curve.x)
    assert curve.x[0] < curve.values_per_point
    assert curve.x[-1] > count - 2 * curve.values_per_point


def test_a_run_chosen_in_one_figure_stands_out_in_all_and_in_the_list(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, workers=workers) for workers in (1, 2)]
    choice, *boxes = linked_selection(compare(runs), pareto(runs)).widget().children
    screens = [box.children[1] for box in boxes]
    assert [label for label, _ in choice.options] == ["no run", "workers 1", "workers 2"]
    screens[1].chosen = entries(runs)[0].key  # like a click in the browser
    assert choice.label == "workers 1"
    assert screens[0].chosen == entries(runs)[0].key
    choice.value = ""
    assert [screen.chosen for screen in screens] == ["", ""]


def test_until_a_figure_is_drawn_its_words_stand_there(tmp_path: Path) -> None:
    figure = pareto([write_run(tmp_path)])
    _, box = linked_selection(figure).widget().children
    words, plot = box.children
    assert figure.alt in unescape(words.value)
    assert plot.figure["data"] == figure.content["data"]
    assert plot.ended  # no further data will follow


def test_a_job_leaves_plain_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    both = linked_selection(compare([write_run(tmp_path)]), pareto([write_run(tmp_path)]))
    monkeypatch.setenv("LABKIT_JOB", "somewhere")
    both._ipython_display_()
    assert displayed == list(both.figures)


def test_no_figures_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="without figures"):
        linked_selection()
