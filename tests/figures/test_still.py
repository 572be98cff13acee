"""Test that a still picture shows a figure's numbers in place and checks untrusted input."""

from __future__ import annotations

import base64
import time
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from labkit.figures.kit.still import picture

LAYOUT = {"height": 300, "margin": {"t": 10, "b": 40}}


def drawn(*traces: dict[str, Any], **layout: Any) -> ElementTree.Element:
    return ElementTree.fromstring(picture({"data": list(traces), "layout": LAYOUT | layout}))


def shapes(svg: ElementTree.Element, color: str) -> list[list[tuple[float, float]]]:
    """Return the points of all lines in a colour."""
    return [
        [(float(a), float(b)) for a, _, b in (pair.partition(",") for pair in points.split())]
        for each in svg.iter("polyline")
        if each.get("stroke") == color and (points := each.get("points"))
    ]


def said(svg: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in svg.iter("text")]


def test_a_line_goes_where_its_numbers_are_and_stops_where_they_are_missing() -> None:
    line = {"x": [0, 1, 2, 3, 4], "y": [0.0, 1.0, None, 1.0, 0.0], "line": {"color": "#112233"}}
    axis = {"range": [0, 4], "title": {"text": "step"}}
    svg = drawn(line, xaxis=axis, yaxis={"range": [0, 1]})
    first, second = shapes(svg, "#112233")
    assert [y for _, y in first] == [260, 10]  # top and bottom of the plot, inside the margins
    assert [y for _, y in second] == [10, 260]
    steps = np.diff([x for x, _ in [*first, *second]])
    assert steps == pytest.approx([steps[0], 2 * steps[0], steps[0]], abs=0.2)
    assert {"step", "0", "2", "4"} <= set(said(svg))


def test_the_title_of_a_panel_ends_before_the_next_panel() -> None:
    line = {"x": [0, 1], "y": [0, 1]}
    long = "mean over seeds; band: their spread; a cross: not reached by all of them"
    notes = [
        {"xref": "paper", "yref": "paper", "x": x, "y": 1, "text": f"Title<br>{long}"}
        for x in (0, 0.55)
    ]
    beside = {"xaxis": {"domain": [0, 0.45]}, "xaxis2": {"domain": [0.55, 1]}}
    svg = drawn(line, line | {"xaxis": "x2", "yaxis": "y2"}, annotations=notes, **beside)
    texts = [each for each in svg.iter("text") if (each.text or "").startswith("mean over")]
    starts = sorted(float(text.get("x", 0)) for text in texts)
    for text, end in zip(texts, [starts[1], 640.0], strict=True):
        assert text.text
        assert text.text.endswith("…")
        assert float(text.get("x", 0)) + 5 * len(text.text) < end
    whole = drawn(line, annotations=notes[:1])
    assert long in said(whole)


def test_packed_numbers_are_read_and_powers_are_even_steps() -> None:
    values = np.array([1.0, 10.0, 100.0])
    packed = {"dtype": "f8", "bdata": base64.b64encode(values.tobytes()).decode()}
    line = {"x": [1, 2, 3], "y": packed, "line": {"color": "#112233"}}
    svg = drawn(line, yaxis={"type": "log"})
    [points] = shapes(svg, "#112233")
    heights = [y for _, y in points]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert {"1", "10", "100"} <= set(said(svg))


def test_a_band_of_numpys_numbers_is_drawn_and_many_markers_are_one_path() -> None:
    x = np.arange(30, dtype=np.float32)
    low, high = ({"x": x, "y": x + d, "line": {"width": 0}, "mode": "lines"} for d in (0, 1))
    dots = {"x": x, "y": x, "mode": "markers", "marker": {"color": ["#112233"] * 30}}
    svg = drawn(low, high | {"fill": "tonexty", "fillcolor": "#445566"}, dots)
    assert [each.get("fill") for each in svg.iter("polygon")] == ["#445566"]
    [path] = svg.iter("path")
    assert path.get("d", "").count("M") == 30


def test_bars_begin_at_nothing_and_stand_beside_each_other() -> None:
    bars = [
        {"type": "bar", "x": ["a", "b"], "y": [1, 2 * each], "marker": {"color": color}}
        for each, color in ((1, "#110000"), (2, "#220000"))
    ]
    rows = [each.attrib for each in drawn(*bars, yaxis={"range": [0, 4]}).iter("rect")]
    assert [float(row["height"]) for row in rows] == pytest.approx([62.5, 125, 62.5, 250], abs=0.1)
    assert {float(row["y"]) + float(row["height"]) for row in rows} == {260.0}
    ends = sorted((float(row["x"]), float(row["x"]) + float(row["width"])) for row in rows)
    assert all(left <= right + 0.11 for (_, left), (right, _) in pairwise(ends))


@pytest.mark.parametrize("mode", ["stack", "overlay"])
def test_bars_are_stacked_or_begin_at_their_base_in_one_place(mode: str) -> None:
    lengths, bases = ([1, 2], [3, None]), ([0, 0], [1, 2])
    bars = [
        {"type": "bar", "orientation": "h", "y": ["a", "b"], "x": x, "marker": {"color": color}}
        | ({"base": np.array(base)} if mode == "overlay" else {})
        for x, base, color in zip(lengths, bases, ("#110000", "#220000"), strict=True)
    ]
    rows = [each.attrib for each in drawn(*bars, barmode=mode).iter("rect")]
    assert [row["fill"] for row in rows] == ["#110000", "#110000", "#220000"]
    (x1, w1), (x2, w2), (x3, w3) = ((float(row["x"]), float(row["width"])) for row in rows)
    assert (x1, w2, w3) == pytest.approx((x2, 2 * w1, 3 * w1), abs=0.2)
    assert x3 == pytest.approx(x1 + w1, abs=0.2)
    assert x3 + w3 < 640  # the axis ends after the last bar
    assert rows[0]["y"] == rows[2]["y"]


def test_a_band_lies_between_its_ends_and_cells_have_their_numbers() -> None:
    quiet = {"x": [0, 1], "line": {"width": 0}}
    edge = {"y": [1, 1], **quiet, "fill": "tonexty", "fillcolor": "rgba(1,2,3,0.2)"}
    svg = drawn({"y": [0, 0], **quiet}, edge)
    [band] = svg.iter("polygon")
    assert len((band.get("points") or "").split()) == 4
    scale = [[0, "#000000"], [1, "#ffffff"]]
    heat = {"type": "heatmap", "z": [[1.0, 2.0], [3.0, None]], "colorscale": scale}
    svg = drawn(heat, xaxis={}, yaxis={})
    assert [cell.get("fill") for cell in svg.iter("rect")] == ["#000000", "#808080", "#ffffff"]
    assert {"1", "2", "3"} <= set(said(svg))


def test_runs_cross_parallel_axes() -> None:
    dimensions = [{"label": "rate", "values": [1, 2]}, {"label": "loss", "values": [0.5, 0.1]}]
    svg = drawn({"type": "parcoords", "dimensions": dimensions})
    up, down = shapes(svg, "#0072B2")
    assert up[0][1] > up[1][1]
    assert down[0][1] < down[1][1]
    assert {"rate", "loss"} <= set(said(svg))


@pytest.mark.slow
def test_a_long_history_keeps_to_its_room() -> None:
    lines = [{"y": list(range(5000)), "line": {"color": "#112233"}} for _ in range(200)]
    assert len(picture({"data": lines, "layout": LAYOUT})) < 200_000


@pytest.mark.parametrize(
    "trace",
    [
        {"y": "abc", "x": 3},
        {"y": {"bdata": "AAA", "dtype": "f8"}},
        {"type": "heatmap", "z": 4},
        {"type": "bar", "y": [[1], {}]},
        {"type": "sankey"},
        {"y": [1, 2], "line": 7},
    ],
)
def test_what_cannot_be_drawn_has_no_picture(trace: dict[str, Any]) -> None:
    assert picture({"data": [trace], "layout": LAYOUT}) == ""


def test_a_strangers_texts_and_colours_stay_text() -> None:
    evil = "'/><script>window.hit = 1</script>"
    home = "/home/alice/x.npz"
    line = {"y": [1, 2], "x": [evil, home], "line": {"color": evil}, "marker": {"color": [evil]}}
    svg = drawn(line | {"mode": "lines+markers+text", "text": [evil, evil]}, xaxis={"title": evil})
    assert not list(svg.iter("script"))
    assert not any("alice" in text for text in said(svg))
    assert "nan" not in "".join(each.get("d", "") for each in svg.iter("path"))


def test_lines_of_a_title_stand_above_each_other() -> None:
    note = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "text": "<b>Accuracy</b><br>by bytes"}
    line = {"x": [0, 1], "y": [0.0, 1.0]}
    svg = drawn(line, annotations=[note])
    places = {each.text: float(each.get("y", "")) for each in svg.iter("text")}
    assert places["by bytes"] - places["Accuracy"] == 14
    svg = drawn(line, annotations=[note | {"yanchor": "top"}])
    hung = {each.text: float(each.get("y", "")) for each in svg.iter("text")}
    assert hung["Accuracy"] == places["by bytes"]


@pytest.mark.parametrize(
    "record",
    [
        {"data": [{"type": "bar", "x": [f"c{n}" for n in range(9_000)], "y": [1] * 9_000}]},
        {"data": [{"type": "heatmap", "z": [[0.5] * 500 for _ in range(500)]}]},
        {"data": [{"y": [1, 2]} for _ in range(20_000)]},
        {
            "data": [{"y": [1, 2]}],
            "layout": {"yaxis": {"type": "log", "range": [-1e9, 1e9]}},
        },
        {
            "data": [{"y": [1, 2]}],
            "layout": {"yaxis": {"type": "log", "range": [0, 1e-9]}},
        },
        {
            "data": [{"y": [1, 2]}],
            "layout": {"xaxis": {"tickvals": [n / 2e4 for n in range(20_000)]}},
        },
        {
            "data": [{"y": [1, 2]}],
            "layout": {"yaxis": {"range": [-1e308, 1e308]}},
        },
    ],
    ids=["categories", "cells", "traces", "decades", "no decade", "ticks", "ends"],
)
def test_what_nobody_could_see_is_not_drawn(record: dict[str, Any]) -> None:
    begin = time.process_time()
    svg = picture(record)
    assert len(svg) < 2_000_000
    assert svg.count("<text") < 200
    assert time.process_time() - begin < 5
