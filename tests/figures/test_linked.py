"""A run that is chosen in one figure stands out in all of them."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from labkit.common.errors import InvalidInput
from labkit.figures import compare, linked_selection, pareto
from labkit.figures.kit.entries import entries


def test_a_run_chosen_in_one_figure_stands_out_in_all_and_in_the_list(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, workers=workers) for workers in (1, 2)]
    choice, *boxes = linked_selection(compare(runs), pareto(runs)).widget().children
    screens = [box.children[1] for box in boxes]
    assert [label for label, _ in choice.options] == ["no run", "workers 1", "workers 2"]
    screens[1].chosen = entries(runs)[0].key  # as a click in the browser does
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
    assert plot.ended  # what is drawn at first is all there will be


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
