"""Figures that select together: a run chosen in one of them stands out in all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape, unescape
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    import ipywidgets

    from labkit.figures.kit.canvas import Figure

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
        import traitlets

        from labkit.figures.kit.screen import Screen

        # The empty key is nobody's.
        options = [(_NOBODY, ""), *((label, key) for key, label in self.labels.items())]
        choice = ipywidgets.Dropdown(options=options, value="", description="stands out:")
        panels = []
        for figure in self.figures:
            screen = Screen(figure.content, words=f"<p>{escape(figure.alt)}</p>")
            screen.show(screen.content, ended=True)
            traitlets.link((choice, "value"), (screen.plot, "chosen"))
            panels.append(screen.widget)
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


def _runs(figure: Figure) -> Iterator[tuple[str, str]]:
    """Keys and labels of the runs that have traces of their own."""
    for trace in figure.data:
        if "run" in (trace.meta or {}):
            yield trace.meta["run"], unescape(trace.name)
