"""A Plotly figure that notebooks keep, that asks no host for anything, and that is read aloud."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from labkit.common.canonical_json import JSON
from labkit.figures.kit.entries import INK, MANY, Entry, Line, safe_text
from labkit.figures.kit.panels import BELOW, PLOT, Panel, Trace

# What Plotly offers beside the figure: nothing that leaves this machine.
CONFIG: dict[str, str | bool] = {
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "responsive": True,
}
GRID = "rgba(128,128,128,0.25)"
CLEAR = "rgba(0,0,0,0)"


class Figure(go.Figure):
    """A Figure whose notebook output is Plotly's own type beside its alternative text.

    Plotly's default renderer emits its own type only, which a conversion to HTML drops; its HTML
    renderers name a host for MathJax. So this one emits both: JupyterLab and labkit's report draw
    the figure, everything else shows the words.
    """

    _ipython_display_: Callable[[], None] | None = None  # IPython prefers it to the bundle below

    @property
    def alt(self) -> str:
        """The figure in words."""
        return str((self.layout.meta or {}).get("alt", ""))

    @property
    def content(self) -> Trace:
        """Data and layout, as a browser takes them."""
        content: Trace = json.loads(self.to_json())
        # Without a width, JupyterLab forgets the height when its window changes.
        return content | {"layout": {"width": WIDTH} | content["layout"]}

    def _repr_mimebundle_(self, *args: str, **kwargs: str) -> Trace:
        return {
            "application/vnd.plotly.v1+json": self.content | {"config": CONFIG},
            "text/html": f"<p>{escape(self.alt)}</p>",
            "text/plain": self.alt,
        }

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.alt)}</p>"


def html_page(figure: go.Figure) -> str:
    """Return a figure as an HTML file, which says that labkit has written it."""
    # MathJax would be asked for from a server; no figure of labkit's needs it.
    page: str = figure.to_html(config=CONFIG, include_mathjax=False)
    return page.replace("<head>", '<head><meta name="generator" content="labkit">', 1)


# Pixels; a notebook's cell and a report's page are about so wide.
WIDTH, NARROW = 920, 760
ABOVE = 48  # the titles above a panel's plot
HEAD, REMARK, LEFT, RIGHT, GAP = 40, 30, 62, 16, 84
LEGEND_LINE, NOTE_LINE, LETTER, SMALL_LETTER = 30, 15, 6.4, 5.9

# What of a trace has a value a point, once several are joined.
_BY_POINT = {
    *("x", "y", "color", "symbol", "hovertemplate", "hovertext", "array", "arrayminus", "shape")
}
_WHISKER = {"color": INK, "thickness": 0.75, "width": 0}  # Plotly knows one look a trace
_DROPPED = {"name", "legendgroup", "meta"}


def draw(
    rows: Sequence[Sequence[Panel]],
    shown: Sequence[Entry | Line],
    title: str,
    remark: str,
    alt: str,
    plot: int = PLOT,
    below: int = BELOW,
) -> Figure:
    """Lay rows of panels on one canvas, title and remark above, one legend of all runs below.

    plot, below: pixels from the top of a panel's axes to their bottom, and of the labels under it.
    """
    head = HEAD + (REMARK if remark else 0)
    heights = [ABOVE + plot + below + _notes_height(panels) for panels in rows]
    # Computed before anything is drawn: Plotly would take the legend's room from the panels.
    legend = _legend_height(shown)
    inner = sum(heights)  # what Plotly's "paper" spans
    figure = Figure()
    layout = base_layout(title, remark, alt) | {"height": head + inner + legend}
    layout["margin"] = {"t": head, "b": legend, "l": LEFT, "r": RIGHT, "pad": 0}
    linked: dict[str, str] = {}
    number = 0
    for row, panels in enumerate(rows):
        top = 1 - (sum(heights[:row]) + ABOVE) / inner
        # In shares of the whole, as Plotly wants domains, though heights are pixels.
        y_domain = [top - plot / inner, top]
        for x_domain, panel in zip(_columns(len(panels)), panels, strict=True):
            number += 1
            end = "" if number == 1 else str(number)
            x_axis = axis(panel.x, domain=x_domain, anchor=f"y{end}", **panel.x_axis)
            y_axis = axis(panel.y, domain=y_domain, anchor=f"x{end}", **panel.y_axis)
            # The first panel of a link holds the axis that the others follow.
            if panel.link and linked.setdefault(panel.link, f"x{end}") != f"x{end}":
                x_axis["matches"] = linked[panel.link]
            if not panel.traces:
                # A note alone: axes around it would look like those of lost data.
                x_axis["visible"] = y_axis["visible"] = False
            layout |= {f"xaxis{end}": x_axis, f"yaxis{end}": y_axis}
            layout["annotations"] += _words(panel, x_domain, y_domain, below)
            axes = {"xaxis": f"x{end}", "yaxis": f"y{end}"}
            # So many have no legend, whose clicks need traces of their own.
            traces = panel.traces if len(shown) <= MANY else gathered(panel.traces)
            figure.add_traces([{"type": "scatter"} | trace | axes for trace in traces])
    if switched := [panel.over for panels in rows for panel in panels if panel.over]:
        layout["updatemenus"] = [_switch(figure, switched)]
    if legend and all(isinstance(entry, Entry) for entry in shown):
        layout["meta"] |= {"legend": legend}
    if legend:
        # Traces of their own, so that a run is named once, in however many panels it is drawn.
        figure.add_traces([_legend_trace(entry) for entry in shown])
    figure.update_layout(layout)
    return figure


def _switch(figure: Figure, panels: Sequence[dict[str, Trace]]) -> Trace:
    """Buttons that move the first panels' traces to another x axis; a page has its own."""
    places = [place for place, trace in enumerate(figure.data) if "over" in (trace.meta or {})]
    buttons = []
    for name in panels[0]:
        moved = [
            trace.x if name == "step" else trace.meta["over"].get(name, [None])
            for trace in (figure.data[place] for place in places)
        ]
        layout: Trace = {}
        for number, over in enumerate(panels, 1):
            ticks: Trace = {"tickvals": None, "ticktext": None, "type": "linear"} | over[name]
            end = "" if number == 1 else str(number)
            layout |= {f"xaxis{end}.{key}": value for key, value in ticks.items()}
            layout[f"xaxis{end}.autorange"] = "range" not in over[name]
        args = [{"x": moved}, layout, places]
        buttons.append({"label": f"by {name}", "method": "update", "args": args})
    place = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "top", "pad": {"r": 0, "t": 4}}
    look = {"bgcolor": CLEAR, "bordercolor": INK, "font": {"color": INK, "size": 11}}
    return {"type": "buttons", "direction": "right", "buttons": buttons} | place | look


def alone(panel: Panel, plot: int, below: int, many: bool) -> Trace:
    """One panel as a figure without words around it, which the page has; many: of many runs.

    As it is, without Plotly's `Figure`: to check a hundred curves takes longer than to draw them.
    """
    # Beside others a panel leaves the names of its rows to the first of them.
    named = {name: value for name, value in panel.y_axis.items() if name != "showticklabels"}
    x_axis, y_axis = axis(panel.x, **panel.x_axis), axis(panel.y, **named)
    traces = gathered(panel.traces) if many else panel.traces
    layout = base_layout("", "", panel.title) | {"xaxis": x_axis, "yaxis": y_axis}
    del layout["template"]  # it is Python's Plotly that has names for them
    layout |= {"height": plot + below + 12, "showlegend": False}
    layout["margin"] = {"t": 12, "b": below, "l": LEFT, "r": RIGHT, "pad": 0}
    layout["meta"] = {"alt": panel.title, "over": panel.over}
    for each in (x_axis, y_axis):
        each.setdefault("automargin", True)
    told = ({"type": "scatter"} | {k: v for k, v in t.items() if v is not None} for t in traces)
    return {"data": list(told), "layout": layout}


def _legend_trace(entry: Entry | Line) -> Trace:
    """Draws nothing but the run's line in the legend; a click there hides the run everywhere."""
    line = {"color": entry.color, "dash": entry.dash, "width": 3}
    marker = {"color": entry.color, "symbol": entry.symbol, "size": 8}
    look = {"mode": "lines+markers", "line": line, "marker": marker, "showlegend": True}
    return {"type": "scatter", "x": [None], "y": [None]} | look | entry.style


def _legend_height(shown: Sequence[Entry | Line]) -> int:
    if not shown or len(shown) > MANY:
        return 0
    widest = max(len(entry.label) for entry in shown) * LETTER + 50
    columns = max(1, int(WIDTH // widest))
    return 10 + LEGEND_LINE * math.ceil(len(shown) / columns)


def _columns(count: int) -> list[list[float]]:
    """Where `count` panels stand beside each other, with room for their axes between them."""
    gap = GAP / (WIDTH - LEFT - RIGHT)
    width = (1 - gap * (count - 1)) / count
    return [[place * (width + gap), place * (width + gap) + width] for place in range(count)]


def _words(panel: Panel, x: Sequence[float], y: Sequence[float], below: int) -> list[Trace]:
    """The panel's title above it, and its note in it or below it."""
    first, _, rest = panel.title.partition("\n")
    small = f'<br><span style="font-size:11px">{safe_text(rest)}</span>' if rest else ""
    look = {"xref": "paper", "yref": "paper", "showarrow": False}
    title = look | {
        "text": f"<b>{safe_text(first)}</b>{small}",
        "align": "left",
        "font": {"size": 13},
        "x": x[0],
        "xanchor": "left",
        "y": y[1],
        "yanchor": "bottom",
        "yshift": 6,
    }
    if not panel.note or (panel.traces and not panel.always_note):
        return [title]
    lines = _note_lines(panel, x[1] - x[0])
    note = look | {
        "text": "<br>".join(safe_text(line) for line in lines),
        "font": {"size": 11},
        "x": (x[0] + x[1]) / 2,
        "xanchor": "center",
    }
    if panel.traces:
        place = {"y": y[0], "yanchor": "top", "yshift": 12 - below if panel.x else -6}
    else:
        place = {"y": (y[0] + y[1]) / 2, "yanchor": "middle"}
    return [title, note | place]


def _note_lines(panel: Panel, width: float) -> list[str]:
    """The note, broken to fit a panel of this share of the canvas."""
    # By the width of a narrow page, where the note must fit, too.
    letters = int(width * NARROW / SMALL_LETTER)
    return [line for part in panel.note.split("\n") for line in textwrap.wrap(part, letters)]


def _notes_height(panels: Sequence[Panel]) -> int:
    """Pixels that the notes below a row of panels need."""
    noted = [panel for panel in panels if panel.traces and panel.note and panel.always_note]
    lines = [len(_note_lines(panel, 0.9 / len(panels))) for panel in noted]
    return NOTE_LINE * max(lines, default=0)


def axis(title: str, **changes: JSON) -> Trace:
    look = {
        "title": {"text": title, "font": {"size": 12}, "standoff": 6},
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": INK,
        "tickfont": {"size": 11},
        "nticks": 6,
    }
    return look | changes


def base_layout(title: str, remark: str, alt: str) -> Trace:
    """The look of the canvas, on light and dark pages alike."""
    heading = {"text": safe_text(title), "font": {"size": 15}, "x": 0, "xref": "paper", "y": 1}
    place = {"xanchor": "left", "yanchor": "top", "yref": "container", "pad": {"t": 8}}
    under = {"subtitle": {"text": safe_text(remark), "font": {"size": 12}}} if remark else {}
    legend = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"}
    return {
        # Plotly's templates bring colours for one kind of page; these have to do on light and dark
        # ones.
        "template": "none",
        "title": heading | place | under,
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {"namelength": -1},
        "legend": legend | {"bgcolor": CLEAR, "font": {"size": 12}},
        "bargap": 0.3,
        "annotations": [],
        "meta": {"alt": alt},
    }


def gathered(traces: Sequence[Trace]) -> list[Trace]:
    """Many traces of one point as one of many points: a browser draws it a hundred times faster.

    A trace says whose it is in its `meta`, for the picker and for linked selection: `run`, the key
    of the one run that it draws; `runs`, those of the several whose line or band it is; `points`,
    for each of its points the keys of the runs that it stands for. The legend can no longer hide
    the runs of joined points, so this is for figures without one.
    """
    others: list[Trace] = []
    alike: dict[tuple[str | None, ...], list[Trace]] = {}
    for trace in traces:
        # A line through the points of several runs would say that they belong together.
        lone = len(trace["x"]) == 1 and "lines" not in (trace.get("mode") or "")
        meta = trace.get("meta") or {}
        # One with places on other axes goes there by itself.
        if lone and "run" in meta and "over" not in meta:
            look = (trace.get("type"), trace.get("mode"), *sorted(set(trace) - _DROPPED))
            alike.setdefault(look, []).append(dict(trace))
        else:
            others.append(dict(trace))
    return [*others, *(_joined(group) for group in alike.values())]


def _joined(group: Sequence[Trace]) -> Trace:
    named = [
        trace | {"hovertemplate": f"{trace.get('hovertemplate', '')}<extra>{trace['name']}</extra>"}
        for trace in group
    ]
    bare = [{k: v for k, v in trace.items() if k not in _DROPPED} for trace in named]
    one: Trace = {key: _merged(key, [trace[key] for trace in bare]) for key in bare[0]}
    return one | {"meta": {"points": [[trace["meta"]["run"]] for trace in group]}}


def _merged(key: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        inner = {k: _merged(k, [value[k] for value in values]) for k in first}
        return inner | (_WHISKER if key in ("error_x", "error_y") else {})
    if key in _BY_POINT:
        return [v for value in values for v in (value if isinstance(value, list) else [value])]
    return any(values) if key == "visible" else first
