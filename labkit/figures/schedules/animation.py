"""Figures that are played frame by frame: play, pause, a slider, and a table of the frames."""

from __future__ import annotations

from typing import Any

from labkit.figures.kit.canvas import CLEAR, GRID, Figure
from labkit.figures.kit.entries import INK

ACTIVE = "#0072B2"
MILLISECONDS = 1400  # a frame, when played


class Animation(Figure):
    """A figure with frames, and folded below it a table of them, a row a frame.

    Plotly's buttons and slider answer to no keyboard; what unfolds does, and needs no script.
    """

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(super()._repr_mimebundle_(), raw=True)
        display({"text/html": self._repr_html_(), "text/plain": self.alt}, raw=True)

    def _repr_html_(self) -> str:
        return f"<details><summary>Step by step</summary>{self.layout.meta['table']}</details>"


def text_trace(x: Any, y: Any, texts: list[str], letters: int, **changes: Any) -> dict[str, Any]:
    """Words at points, as a trace: frames of traces need no new layout."""
    look = {"mode": "text", "textfont": {"size": letters, "color": INK}, "showlegend": False}
    return {"type": "scatter", "x": x, "y": y, "text": texts, "cliponaxis": False} | look | changes


def at_once(milliseconds: int) -> dict[str, Any]:
    """Jump to a frame: what moves on a screen distracts, and heat maps cannot glide."""
    frame = {"duration": milliseconds, "redraw": True}
    return {"mode": "immediate", "frame": frame, "transition": {"duration": 0}}


def slider(states: int, shown: int, prefix: str, first: int = 0) -> dict[str, Any]:
    """Moves to the frame whose number, from `first` on, stands behind the prefix."""
    steps = [
        {"method": "animate", "label": str(number), "args": [[str(number)], at_once(0)]}
        for number in range(first, first + states)
    ]
    return {
        "steps": steps,
        "active": shown,
        "x": 0.24,
        "len": 0.76,
        "y": 0,
        "yanchor": "top",
        "pad": {"t": 12, "b": 0, "l": 0, "r": 0},
        "currentvalue": {"prefix": prefix, "xanchor": "left", "offset": 4},
        "bgcolor": GRID,
        "bordercolor": INK,
        "activebgcolor": ACTIVE,
        "tickcolor": INK,
        "font": {"color": INK, "size": 11},
    }


def buttons() -> dict[str, Any]:
    """Play and pause."""
    play = {"label": "▶ play", "args": [None, at_once(MILLISECONDS) | {"fromcurrent": True}]}
    pause = {"label": "❚❚ pause", "args": [[None], at_once(0)]}
    return {
        "type": "buttons",
        "direction": "left",
        "buttons": [button | {"method": "animate"} for button in (play, pause)],
        "showactive": False,
        "x": 0,
        "xanchor": "left",
        "y": 0,
        "yanchor": "top",
        "pad": {"t": 26, "l": 0, "r": 0, "b": 0},
        "bgcolor": CLEAR,
        "bordercolor": INK,
        "font": {"color": INK, "size": 12},
    }
