"""Figures that are played frame by frame: play, pause, a slider, and a table of the frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from labkit.figures.kit.canvas import CLEAR, GRID, HEAD, Figure, base_layout
from labkit.figures.kit.entries import INK
from labkit.figures.kit.panels import Trace

Points = NDArray[np.float64]  # shape (points, 2): x and y

ACTIVE = "#0072B2"
MILLISECONDS = 1400  # a frame, when played
CONTROLS, LEGEND = 74, 34  # pixels below the axes: buttons and slider, then the legend
BARE: Trace = {"visible": False, "fixedrange": True}  # an invisible axis without zoom


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


def animation(
    fixed: Sequence[Trace],
    states: Sequence[Sequence[Trace]],
    layout: Trace,
    title: str,
    alt: str,
    table: str,
    step: str,
    first: int = 0,
    shown: int = 0,
    names: Sequence[str] = (),
) -> Animation:
    """Return a figure with a frame for each state, all of the same number of traces.

    Args:
        fixed: traces of all frames; states: those that change, frame by frame.
        layout: axes and shapes, with the height between title and legend.
        title, alt: of the figure; table: its frames as HTML.
        step: what stands before a frame's number, which counts from `first`; shown: which frame
            stands there until the figure is played; names: of frames, in place of numbers.
    """
    places = list(range(len(fixed), len(fixed) + len(states[0])))
    frames = [
        go.Frame(name=names[at] if names else str(first + at), data=state, traces=places)
        for at, state in enumerate(states)
    ]
    # The frames' traces come last: a frame names those that it replaces by their place.
    figure = Animation(data=[*fixed, *states[shown]], frames=frames)
    margin = {"t": HEAD, "b": LEGEND + CONTROLS, "l": 16, "r": 16, "pad": 0}
    figure.update_layout(
        base_layout(title, "", alt) | {"margin": margin, "dragmode": False} | layout,
        height=HEAD + layout["height"] + LEGEND + CONTROLS,
        sliders=[_slider([frame.name for frame in frames], shown, step)],
        updatemenus=[_buttons()],
        meta={"alt": alt, "table": table, "controls": CONTROLS},
    )
    return figure


def words(points: ArrayLike, texts: Sequence[str], letters: int, **changes: object) -> Trace:
    """Return texts at points, shape (points, 2), as a trace, because frames replace traces only."""
    # In half the digits: frames repeat all their points, and a figure stays small.
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
    """Return curves with an arrow head at the end of each, as one trace.

    Args: paths: the points of each; hover: what each says; names: what stands at its middle, on
    which `side` of it.
    """
    # One trace for all arrows: a frame has to have as many traces as any other.
    sizes = [len(path) for path in paths]
    # Plotly breaks a line at NaN.
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
            # The head points along the last piece of its curve.
            "angleref": "previous",
            "size": [size for many in sizes for size in (*[0] * (many - 1), 13, 0)],
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
    hover_texts = [text for text, many in zip(hover, sizes, strict=False) for _ in range(many + 1)]
    return look | ({"hovertext": hover_texts} if hover else {})


def legend(entries: Iterable[tuple[str, str, str]]) -> list[Trace]:
    """Return legend entries as traces; entries: name, colour, "square" or the dash of a line."""
    nothing = {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip"}
    return [nothing | {"name": name} | _sample(color, look) for name, color, look in entries]


def _sample(color: str, look: str) -> Trace:
    if look == "square":
        return {"mode": "markers", "marker": {"color": color, "symbol": look, "size": 10}}
    return {"mode": "lines", "line": {"color": color, "dash": look, "width": 2}}


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the frames as an HTML table, for screen readers, paper and keyboards."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    return f"<table><thead><tr>{names}</tr></thead>{body}</table>"


def _at_once(milliseconds: int) -> Trace:
    """Return options to jump to a frame without a transition."""
    frame = {"duration": milliseconds, "redraw": True}
    return {"mode": "immediate", "frame": frame, "transition": {"duration": 0}}


def _slider(names: Sequence[str], shown: int, prefix: str) -> Trace:
    """Return a slider over the frames."""
    return {
        "steps": [
            {"method": "animate", "label": name, "args": [[name], _at_once(0)]} for name in names
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
    """Return the buttons for play and pause."""
    play = {"label": "▶ play", "args": [None, _at_once(MILLISECONDS) | {"fromcurrent": True}]}
    pause = {"label": "❚❚ pause", "args": [[None], _at_once(0)]}
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
