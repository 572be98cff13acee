"""Figures that select together: a run chosen in one of them stands out in all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from html import unescape
from typing import TYPE_CHECKING, TypeAlias

from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    import ipywidgets
    import plotly.graph_objects as go

    from labkit.figures.kit.canvas import Figure

# Takes the key of a run; what it returns is of no use.
Choose: TypeAlias = Callable[[str], bool | None]

FAINT = 0.12  # opacity of what is not chosen
_NOBODY = "no run"


class Linked:
    """What `linked` returns: in JupyterLab widgets, elsewhere the figures themselves."""

    def __init__(self, *figures: Figure) -> None:
        if not figures:
            raise InvalidInput("linked() without figures: give those of lk.compare, figures.pareto")
        self.figures = figures
        self.labels = {key: label for figure in figures for key, label in _runs(figure)}

    def widget(self) -> ipywidgets.VBox:
        """The figures under one another, and above them a list of the runs.

        A click on a run's line, marker or name in a legend chooses it, a second one lets it go.
        """
        import ipywidgets
        import plotly.graph_objects as go

        from labkit.figures.kit.canvas import WIDTH

        # Copies: the figures themselves stay as they are for a report.
        panels = [go.FigureWidget(figure) for figure in self.figures]
        for panel in panels:
            # Drawn before it has a place on the page, it would be as wide as Plotly thinks.
            panel.layout.width = panel.layout.width or WIDTH
        # The empty key is nobody's.
        options = [(_NOBODY, ""), *((label, key) for key, label in self.labels.items())]
        choice = ipywidgets.Dropdown(options=options, value="", description="stands out:")

        def show_all(change: dict[str, str]) -> None:
            for panel in panels:
                show(panel, change["new"])

        choice.observe(show_all, "value")

        def choose(key: str) -> None:
            choice.value = "" if choice.value == key else key

        for panel in panels:
            _listen(panel, choose)
        return ipywidgets.VBox([choice, *panels])

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # What a job leaves behind has no kernel that a widget could ask.
        shown = self.figures if "LABKIT_JOB" in os.environ else [self.widget()]
        for each in shown:
            display(each)


def linked(*figures: Figure) -> Linked:
    """Show figures whose runs select together: choose one in any of them, and all highlight it.

    A click on its line, its marker or its name in a legend chooses a run, and so does the list
    above the figures; a second click lets it go. In the output of `labkit run` they are plain
    figures, which `labkit report` links by its own script.

    Raises: InvalidInput, no figures.
    """
    return Linked(*figures)


def show(panel: go.FigureWidget, key: str) -> None:
    """Let a run stand out in a figure; the empty key: all runs alike."""
    with panel.batch_update():
        for trace in panel.data:
            meta = trace.meta or {}
            if "points" in meta:
                own = [place for place, keys in enumerate(meta["points"]) if key in keys]
                trace.selectedpoints = own if key else None
            elif keys := _keys(meta):
                trace.opacity = 1.0 if not key or key in keys else FAINT


def _listen(panel: go.FigureWidget, choose: Choose) -> None:
    """Pass clicks on markers, lines and legend lines on as the key of their run."""
    for trace in panel.data:
        meta = trace.meta or {}
        if "points" in meta:
            trace.on_click(
                lambda _, points, __, meta=meta: [
                    choose(meta["points"][place][0]) for place in points.point_inds[:1]
                ]
            )
        elif "run" in meta:
            trace.on_click(
                lambda _, points, __, meta=meta: choose(meta["run"]) if points.point_inds else None
            )
            if trace.showlegend:
                trace.on_change(lambda it, shown: _from_legend(panel, it, shown, choose), "visible")


def _from_legend(
    panel: go.FigureWidget, line: go.Scatter, visible: bool | str, choose: Choose
) -> None:
    """Plotly hides a run whose name in the legend is clicked: show it again, and choose it."""
    if visible != "legendonly":
        return
    with panel.batch_update():
        for trace in panel.data:
            if trace.legendgroup == line.legendgroup:
                # A click in the legend means "choose" here, and Plotly has already hidden the
                # trace.
                trace.visible = True
    choose(line.meta["run"])


def _runs(figure: Figure) -> Iterator[tuple[str, str]]:
    """Keys and labels of the runs that have traces of their own."""
    for trace in figure.data:
        if "run" in (trace.meta or {}):
            yield trace.meta["run"], unescape(trace.name)


def _keys(meta: Mapping[str, str | list[str]]) -> list[str]:
    named = meta.get("run") or meta.get("runs") or []
    return [named] if isinstance(named, str) else named
