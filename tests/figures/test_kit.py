"""Test the shared parts of figures: labels, sheets and screens."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.figures.kit.entries import LONGEST, MANY, names
from labkit.figures.kit.sheet import Sheet
from labkit.figures.kit.still import picture
from labkit.figures.runs.interactive import LiveFigure
from labkit.records.analysis.columns import Value

VALUES = {
    "strategy": st.sampled_from(["AllReduce", "DelayedGradients"]),
    "compressor": st.sampled_from([None, "OneBit", "ErrorFeedback(TopK(ratio=0.01))", "Q" * 90]),
    "network": st.sampled_from([None, "1GbE", "100Mb"]),
    "workers": st.sampled_from([1, 2, 16]),
    "learning_rate": st.floats(1e-4, 1.0),
    "seed": st.integers(0, 9),
}
ROWS = st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=30)


def told(rows: list[dict[str, Value]]) -> list[str]:
    return names(rows, ["mlp-digits"] * len(rows))


@given(ROWS)
def test_no_two_names_are_the_same_and_none_is_long(rows: list[dict[str, Value]]) -> None:
    found = told(rows)
    assert len(set(found)) == len(rows)
    assert all(name and len(name) <= LONGEST + len(" (30)") for name in found)


@given(ROWS)
def test_what_all_have_in_common_is_in_no_name(rows: list[dict[str, Value]]) -> None:
    same = [row | {"model": "mlp", "epochs": 3} for row in rows]
    assert told(same) == told(rows)


@given(st.permutations(range(12)))
def test_a_name_does_not_depend_on_where_its_run_stands(order: list[int]) -> None:
    rows: list[dict[str, Value]] = [
        {"compressor": compressor, "network": network, "seed": seed}
        for compressor in (None, "OneBit")
        for network in ("1GbE", "100Mb")
        for seed in range(3)
    ]
    found = told(rows)
    assert told([rows[place] for place in order]) == [found[place] for place in order]


def test_names_are_what_one_would_say() -> None:
    top = "ErrorFeedback(TopK(ratio=0.01))"
    rows: list[dict[str, Value]] = [
        {"strategy": strategy, "compressor": compressor, "network": network, "learning_rate": 0.1}
        for network in ("1GbE", "100Mb")
        for strategy, compressor in (("AllReduce", None), ("AllReduce", top), ("Delayed", None))
    ]
    assert told(rows)[:3] == ["AllReduce, 1GbE", "TopK 1 %, 1GbE", "Delayed, 1GbE"]
    assert told([{"workers": 1}, {"workers": 2}]) == ["workers 1", "workers 2"]
    both = told([{"compressor": top}, {"compressor": "TopK(ratio=0.01)"}])
    assert both == ["EF TopK 1 %", "TopK 1 %"]
    assert told([{}, {}]) == ["mlp-digits (1)", "mlp-digits (2)"]
    odd: list[dict[str, Value]] = [{"network": None}, {"network": "1GbE", "model": "cnn"}]
    same: list[dict[str, Value]] = [{"network": name} for name in ("1GbE", "100Mb", "10GbE")]
    rows = [{"model": "mlp"} | row for row in [*odd, *same]]
    assert told(rows)[:2] == ["no network, mlp", "1GbE, cnn"]


def test_a_number_never_makes_a_name_that_another_has() -> None:
    rows: list[dict[str, Value]] = [{"name": "a"}, {"name": "a"}, {"name": "a (1)"}]
    assert len(set(told(rows))) == 3


@pytest.mark.parametrize("count", [1, MANY, MANY + 3])
def test_the_words_of_very_many_are_told_of_some(count: int) -> None:
    said = Sheet([], [], "Title", ["* remark"], [f"run {number}" for number in range(count)]).alt
    assert said.startswith("Title. * remark. run 0")
    assert said.count("run ") == min(count, MANY)
    assert said.endswith(
        "and 3 more texts, which the table contains." if count > MANY else f"{count - 1}."
    )


LIMIT = 100_000  # maximum bytes of the module; anywidget waits two seconds for it

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
    assert [trace["name"] for trace in plot.figure["data"]][-1] == "&lt;b&gt;"
    shown = figure.screen._picture.value
    assert shown == picture(plot.figure, True)
    color = plot.figure["data"][0]["line"]["color"]
    lines = [each for each in elements(shown, "polyline") if each.get("stroke") == color]
    assert [len(each.get("points", "").split()) for each in lines][-3:] == [3, 3, 3]
    said = {each.text for each in elements(shown, "text")}
    assert {"mine · wall clock", "samples/s of a rank", "rank 0", "<b>"} <= said


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
