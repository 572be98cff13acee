"""A figure that changes: what browsers are sent, and the picture that stands in for Plotly."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from labkit.figures.kit.screen import Scale, picture
from labkit.figures.runs.interactive import LiveFigure

LIMIT = 100_000  # bytes of a module that comes up at once: anywidget gives it two seconds

SHARES = {0: {"compute": 0.75, "wait": 0.25}}


def rows(count: int) -> list[dict[str, float]]:
    plain = {"rank": 0, "seconds": 0.5, "samples": 4, "wire_bytes": 2**20}
    return [plain | {"step": step, "loss": float(count - step)} for step in range(count)]


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.tag == tag]


def test_plotly_is_sent_once_and_after_the_first_picture() -> None:
    figures = [LiveFigure("mine", 1), LiveFigure("other", 1)]
    for figure in figures:
        assert figure.screen.plot is None
        assert "<svg" in figure.screen._picture.value
        figure.add(rows(2), [], SHARES)
    plots = [figure.screen.plot for figure in figures]
    assert len({plot._source for plot in plots}) == 1
    assert [len(plot._esm) < LIMIT for plot in plots] == [True, True]


def test_each_change_is_sent_whole_to_both() -> None:
    figure = LiveFigure("mine", 1)
    figure.add(rows(2), [], SHARES)
    figure.add(rows(3)[2:], [{"epoch": 0, "step": 3, "<b>": 0.5}], SHARES, ended=True)
    plot = figure.screen.plot
    assert plot.figure == figure.screen.content
    assert plot.ended
    assert plot.figure["data"][0]["x"] == [1, 2, 3]
    assert [trace["name"] for trace in plot.figure["data"]][-1] == "<b>"
    shown = figure.screen._picture.value
    assert shown == picture(plot.figure)
    assert len(elements(shown, "polyline")[0].get("points", "").split()) == 3
    said = {each.text for each in elements(shown, "text")}
    assert {"mine · wall clock", "samples/s of the rank", "rank 0", "<b>"} <= said


def test_bars_of_a_picture_lie_end_to_end() -> None:
    figure = LiveFigure("mine", 1)
    figure.add(rows(1), [], SHARES)
    bars = [
        (float(each.get("x", 0)), float(each.get("width", 0)))
        for each in elements(figure.screen._picture.value, "rect")
    ]
    assert [width > 0 for _, width in bars] == [True, False, False, True]
    assert abs(bars[3][0] - (bars[0][0] + bars[0][1])) < 0.2
    assert abs(bars[0][1] - 3 * bars[3][1]) < 0.2


def test_ticks_are_round_and_few() -> None:
    assert Scale(0.3, 2.4, 0, 1).ticks() == [0.5, 1.0, 1.5, 2.0]
    assert Scale(-3.0, 8.0, 0, 1).ticks() == [-2.0, 0.0, 2.0, 4.0, 6.0, 8.0]
    assert len(Scale(0.0, 1e-6, 0, 1).ticks()) <= 7
