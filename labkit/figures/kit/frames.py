"""Animated figures with play, pause, a slider, and a table of the frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from labkit.figures.kit.canvas import CLEAR, GRID, HEAD, Figure, base_layout
from labkit.figures.kit.entries import INK
from labkit.figures.kit.panels import Trace

Points = NDArray[np.float64]  # an array (points, 2) with the x and y of each point

ACTIVE = "#0072B2"
MILLISECONDS = 1400  # milliseconds for which the animation shows each frame
# The controls and the legend have fixed heights in pixels.
CONTROLS, LEGEND = 74, 34
BARE: Trace = {"visible": False, "fixedrange": True}  # an invisible axis that users cannot zoom


class Animation(Figure):
    """An animated figure, with a collapsed table below it that has one row per frame.

    Plotly's buttons and slider do not support the keyboard. The table can be used by keyboard, and
    works without JavaScript.
    """

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(super()._repr_mimebundle_(), raw=True)
        display({"text/html": self._repr_html_(), "text/plain": self.alt}, raw=True)

    def _repr_html_(self) -> str:
        return f"<details><summary>Step by step</summary>{self.layout.meta['table']}</details>"


def animation(
    fixed: Sequence[Trace],
    states: Sequence[Sequence[Trace]],
    layout: Trace,
    title: str,
    alt: str,
    table: str,
    step: str,
    first: int = 0,
    first_frame: int = 0,
    names: Sequence[str] = (),
) -> Animation:
    """Return a figure with one frame per state; all states have the same number of traces.

    Args:
        fixed: Traces that all frames share.
        states: For each frame, the list of traces that change.
        layout: Plotly layout of axes and shapes. Its `height` is the number of pixels between title
            and legend.
        title, alt: Title and alternative text of the figure.
        table: HTML table with one row per frame, which describes the frame.
        step: Text before the frame number, below the slider.
        first: Number that the slider shows for the first frame.
        first_frame: Index of the frame that is visible before the animation starts.
        names: Names of the frames under the slider; default: numbers.
    """
    places = list(range(len(fixed), len(fixed) + len(states[0])))
    frames = [
        go.Frame(name=names[at] if names else str(first + at), data=state, traces=places)
        for at, state in enumerate(states)
    ]
    # The changing traces follow the fixed traces. Each frame lists the indices of the traces that
    # the frame replaces.
    figure = Animation(data=[*fixed, *states[first_frame]], frames=frames)
    margin = {"t": HEAD, "b": LEGEND + CONTROLS, "l": 16, "r": 16, "pad": 0}
    figure.update_layout(
        base_layout(title, "", alt) | {"margin": margin, "dragmode": False} | layout,
        height=HEAD + layout["height"] + LEGEND + CONTROLS,
        sliders=[_slider([frame.name for frame in frames], first_frame, step)],
        updatemenus=[_buttons()],
        meta={"alt": alt, "table": table, "controls": CONTROLS},
    )
    return figure


def words(points: ArrayLike, texts: Sequence[str], letters: int, **changes: object) -> Trace:
    """Return texts at points (points, 2) as a trace, which frames can change."""
    # Single precision halves the size of the figure, because each frame repeats all points.
    x, y = np.array(points, np.float32).reshape(-1, 2).T.round(3)
    look = {"mode": "text", "textfont": {"size": letters, "color": INK}, "showlegend": False}
    quiet = {"cliponaxis": False, "hoverinfo": "skip"}
    return {"type": "scatter", "x": x, "y": y, "text": texts} | quiet | look | changes


def arrows(
    paths: Sequence[Points],
    color: str,
    dash: str = "solid",
    hover: Sequence[str] = (),
    names: Sequence[str] = (),
    side: str = "top",
) -> Trace:
    """Return curves with an arrow head at the end of each curve, as one trace.

    Args:
        paths: Points of each curve, shape (points, 2).
        color, dash: Colour and dash of all curves.
        hover: Hover text of each curve.
        names: Label of each curve, at its middle; default: no labels.
        side: Side of a curve on which its label is drawn, "top" or "bottom".
    """
    # All arrows form one trace, so that every frame has the same number of traces.
    sizes = [len(path) for path in paths]
    # A point of NaN between two curves separates them, because Plotly breaks a line at NaN.
    gap = np.full((1, 2), np.nan)
    parts = [part for path in paths for part in (path, gap)]
    points = np.concatenate([gap[:0], *parts]).astype(np.float32)
    middles = [
        ["" if at != size // 2 else name for at in range(size + 1)]
        for size, name in zip(sizes, names, strict=False)
    ]
    look: Trace = {
        "type": "scatter",
        "x": points[:, 0],
        "y": points[:, 1],
        "mode": "lines+markers+text" if names else "lines+markers",
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {
            "symbol": "arrow",
            # The arrow head points along the last segment of its curve.
            "angleref": "previous",
            "size": [size for size in sizes for size in (*[0] * (size - 1), 13, 0)],
            "color": color,
            "opacity": 1,
            "line": {"width": 0},
        },
        "hoverinfo": "text" if hover else "skip",
        "showlegend": False,
    }
    if names:
        look |= {
            "text": [text for texts in middles for text in texts],
            "textposition": f"{side} center",
            "textfont": {"size": 14, "color": color},
        }
    hover_texts = [text for text, size in zip(hover, sizes, strict=False) for _ in range(size + 1)]
    return look | ({"hovertext": hover_texts} if hover else {})


def legend(entries: Iterable[tuple[str, str, str]]) -> list[Trace]:
    """Return one trace per legend entry; an entry is (name, colour, "square" or line dash)."""
    nothing = {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip"}
    return [nothing | {"name": name} | _sample(color, look) for name, color, look in entries]


def _sample(color: str, look: str) -> Trace:
    if look == "square":
        return {"mode": "markers", "marker": {"color": color, "symbol": look, "size": 10}}
    return {"mode": "lines", "line": {"color": color, "dash": look, "width": 2}}


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table of the frames, for screen readers, print and keyboard use."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    return f"<table><thead><tr>{names}</tr></thead>{body}</table>"


def _frame_options(milliseconds: int) -> Trace:
    """Return Plotly options that show each frame for some milliseconds, without a transition."""
    frame = {"duration": milliseconds, "redraw": True}
    return {"mode": "immediate", "frame": frame, "transition": {"duration": 0}}


def _slider(names: Sequence[str], shown: int, prefix: str) -> Trace:
    """Return a slider that selects a frame."""
    return {
        "steps": [
            {"method": "animate", "label": name, "args": [[name], _frame_options(0)]}
            for name in names
        ],
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


def _buttons() -> Trace:
    """Return the play and pause buttons."""
    play = {"label": "▶ play", "args": [None, _frame_options(MILLISECONDS) | {"fromcurrent": True}]}
    pause = {"label": "❚❚ pause", "args": [[None], _frame_options(0)]}
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
