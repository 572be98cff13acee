"""A run that is chosen in one figure stands out in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from labkit.common.errors import InvalidInput
from labkit.figures import compare, linked, pareto, scatter
from labkit.figures.kit.entries import MANY, entries
from labkit.figures.runs.linked import FAINT, Linked, show
from labkit.records.run import Run


class Points:
    """What Plotly hands to a click's handler."""

    def __init__(self, *places: int) -> None:
        self.point_inds = list(places)


def widgets(both: Linked) -> tuple[Any, list[Any]]:
    """The list of runs, and the figures below it."""
    choice, *panels = both.widget().children
    return choice, panels


def opacities(panel: Any, run: Run) -> set[float | None]:
    key = entries([run])[0].key
    return {trace.opacity for trace in panel.data if (trace.meta or {}).get("run") == key}


def click(panel: Any, run: Run) -> None:
    """As Plotly does it: all traces hear of the click, the one that was hit with its point."""
    key = entries([run])[0].key
    hit = next(t for t in panel.data if (t.meta or {}).get("run") == key and t.x[0] is not None)
    for trace in panel.data:
        for handler in trace._click_callbacks:
            handler(trace, Points(0) if trace is hit else Points(), None)


def test_a_click_in_one_figure_marks_the_run_in_all_and_a_second_lets_it_go(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, workers=workers) for workers in (1, 2)]
    choice, panels = widgets(linked(compare(runs), pareto(runs)))
    assert [label for label, _ in choice.options] == ["no run", "workers 1", "workers 2"]
    click(panels[1], runs[0])
    assert choice.label == "workers 1"
    for panel in panels:
        assert opacities(panel, runs[0]) == {1.0}
        assert opacities(panel, runs[1]) == {FAINT}
    click(panels[0], runs[0])
    assert choice.label == "no run"
    assert opacities(panels[1], runs[1]) == {1.0}


def test_a_name_in_the_legend_chooses_and_hides_nothing(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, workers=workers) for workers in (1, 2)]
    choice, (panel, other) = widgets(linked(compare(runs), pareto(runs)))
    name = next(trace for trace in panel.data if trace.showlegend and trace.name == "workers 2")
    name.visible = "legendonly"
    assert choice.label == "workers 2"
    assert name.visible is True
    assert opacities(other, runs[0]) == {FAINT}


def test_the_points_of_many_runs_are_selected_by_their_place(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, learning_rate=1.0 + k) for k in range(MANY + 1)]
    _, (panel,) = widgets(linked(scatter(runs, "train_seconds", "test_accuracy")))
    show(panel, entries(runs)[3].key)
    (points,) = [trace for trace in panel.data if (trace.meta or {}).get("points")]
    assert list(points.selectedpoints) == [3]
    show(panel, "")
    assert points.selectedpoints is None


def test_a_job_leaves_plain_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    both = linked(compare([write_run(tmp_path)]), pareto([write_run(tmp_path)]))
    monkeypatch.setenv("LABKIT_JOB", "somewhere")
    both._ipython_display_()
    assert displayed == list(both.figures)


def test_no_figures_is_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="without figures"):
        linked()
