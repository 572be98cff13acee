"""Plotly figures for notebooks and reports, without network requests and with alternative text."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from labkit.common.canonical_json import JSON
from labkit.figures.kit.entries import INK, MANY, LineStyle, RunEntry, safe_text
from labkit.figures.kit.panels import BELOW, PLOT, Panel, Trace

# The options remove the buttons that upload data from Plotly's mode bar.
CONFIG: dict[str, str | bool] = {
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "responsive": True,
}
GRID = "rgba(128,128,128,0.25)"
CLEAR = "rgba(0,0,0,0)"


class Figure(go.Figure):
    """A figure whose notebook output holds both Plotly's MIME type and the alternative text.

    Plotly's default renderer writes only its own MIME type, which a conversion to HTML drops.
    Plotly's HTML renderers load MathJax from a server. With both types in the output, JupyterLab
    and labkit's report draw the figure, and other programs show the text.
    """

    _ipython_display_: Callable[[], None] | None = None  # overrides `_repr_mimebundle_` if set

    @property
    def alt(self) -> str:
        """The alternative text of the figure."""
        return str((self.layout.meta or {}).get("alt", ""))

    @property
    def content(self) -> Trace:
        """Data and layout of the figure as JSON objects."""
        content: Trace = json.loads(self.to_json())
        # JupyterLab loses the height of a figure without a width when its window is resized.
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
    """Return a figure as an HTML page whose metadata names labkit as the generator."""
    # MathJax is excluded, because Plotly would load it from a server, and labkit's figures do not
    # need it.
    page: str = figure.to_html(config=CONFIG, include_mathjax=False)
    return page.replace("<head>", '<head><meta name="generator" content="labkit">', 1)


# These are the widths in pixels of a notebook cell and of a narrow report page.
WIDTH, NARROW = 920, 760
ABOVE = 48  # height in pixels of the title above the axes of a panel
HEAD, REMARK, LEFT, RIGHT, GAP = 40, 30, 62, 16, 84
LEGEND_LINE, NOTE_LINE, LETTER, SMALL_LETTER = 30, 15, 6.4, 5.9

# These trace keys hold one value per point after traces are joined.
_BY_POINT = {
    *("x", "y", "color", "symbol", "hovertemplate", "hovertext", "array", "arrayminus", "shape")
}
_WHISKER = {"color": INK, "thickness": 0.75, "width": 0}  # style of the error bars of joined traces
_DROPPED = {"name", "legendgroup", "meta"}


def draw(
    rows: Sequence[Sequence[Panel]],
    entries: Sequence[RunEntry | LineStyle],
    title: str,
    remark: str,
    alt: str,
    plot: int = PLOT,
    below: int = BELOW,
) -> Figure:
    """Draw rows of panels in one figure, with title and remark above, and one legend below.

    Args:
        rows: Rows of panels, from top to bottom.
        entries: Entries of the legend.
        title, remark, alt: Title, subtitle and alternative text.
        plot: Height of the axes of a panel in pixels.
        below: Height of the labels under the axes in pixels.
    """
    head = HEAD + (REMARK if remark else 0)
    heights = [ABOVE + plot + below + _notes_height(panels) for panels in rows]
    # The legend's height is added to the figure, because Plotly would otherwise shrink the panels.
    legend = _legend_height(entries)
    inner = sum(heights)  # height in pixels of all panels, Plotly's "paper" area
    figure = Figure()
    layout = base_layout(title, remark, alt) | {"height": head + inner + legend}
    layout["margin"] = {"t": head, "b": legend, "l": LEFT, "r": RIGHT, "pad": 0}
    linked: dict[str, str] = {}
    number = 0
    for row, panels in enumerate(rows):
        top = 1 - (sum(heights[:row]) + ABOVE) / inner
        # Plotly expects domains as fractions of the paper, so the pixels are divided by its height.
        y_domain = [top - plot / inner, top]
        for x_domain, panel in zip(_columns(len(panels)), panels, strict=True):
            number += 1
            end = "" if number == 1 else str(number)
            x_axis = axis(panel.x, domain=x_domain, anchor=f"y{end}", **panel.x_axis)
            y_axis = axis(panel.y, domain=y_domain, anchor=f"x{end}", **panel.y_axis)
            # The x axes of linked panels follow that of the first panel with the same link.
            if panel.link and linked.setdefault(panel.link, f"x{end}") != f"x{end}":
                x_axis["matches"] = linked[panel.link]
            if not panel.traces:
                # Axes are hidden around a note, because empty axes would suggest lost data.
                x_axis["visible"] = y_axis["visible"] = False
            layout |= {f"xaxis{end}": x_axis, f"yaxis{end}": y_axis}
            layout["annotations"] += _words(panel, x_domain, y_domain, below)
            axes = {"xaxis": f"x{end}", "yaxis": f"y{end}"}
            # Runs need separate traces only for clicks in the legend, which is omitted for many
            # entries.
            traces = panel.traces if len(entries) <= MANY else join_points(panel.traces)
            figure.add_traces([{"type": "scatter"} | trace | axes for trace in traces])
    if switched := [panel.over for panels in rows for panel in panels if panel.over]:
        layout["updatemenus"] = [_switch(figure, switched)]
    if legend and all(isinstance(entry, RunEntry) for entry in entries):
        layout["meta"] |= {"legend": legend}
    if legend:
        # The legend has traces of its own, so that it names a run once for all panels.
        figure.add_traces([_legend_trace(entry) for entry in entries])
    figure.update_layout(layout)
    return figure


def _switch(figure: Figure, panels: Sequence[dict[str, Trace]]) -> Trace:
    """Return buttons that switch the x axis of the panels, such as from steps to seconds."""
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


def panel_content(panel: Panel, plot: int, below: int, many: bool) -> Trace:
    """Return one panel as Plotly data and layout, without title and legend.

    The function does not use Plotly's `Figure`, because validating a hundred curves takes longer
    than drawing them. With `many`, the points of all runs are joined into one trace.
    """
    # In a row, only the first panel shows the row names; a single panel always shows them.
    named = {name: value for name, value in panel.y_axis.items() if name != "showticklabels"}
    x_axis, y_axis = axis(panel.x, **panel.x_axis), axis(panel.y, **named)
    traces = join_points(panel.traces) if many else panel.traces
    layout = base_layout("", "", panel.title) | {"xaxis": x_axis, "yaxis": y_axis}
    del layout["template"]  # only Plotly for Python, not its script, knows templates by name
    layout |= {"height": plot + below + 12, "showlegend": False}
    layout["margin"] = {"t": 12, "b": below, "l": LEFT, "r": RIGHT, "pad": 0}
    layout["meta"] = {"alt": panel.title, "over": panel.over}
    for x_or_y_axis in (x_axis, y_axis):
        x_or_y_axis.setdefault("automargin", True)
    data = ({"type": "scatter"} | {k: v for k, v in t.items() if v is not None} for t in traces)
    return {"data": list(data), "layout": layout}


def _legend_trace(entry: RunEntry | LineStyle) -> Trace:
    """Return a trace that adds the line of a run to the legend, but draws no points."""
    line = {"color": entry.color, "dash": entry.dash, "width": 3}
    marker = {"color": entry.color, "symbol": entry.symbol, "size": 8}
    look = {"mode": "lines+markers", "line": line, "marker": marker, "showlegend": True}
    return {"type": "scatter", "x": [None], "y": [None]} | look | entry.style


def _legend_height(shown: Sequence[RunEntry | LineStyle]) -> int:
    if not shown or len(shown) > MANY:
        return 0
    widest = max(len(entry.label) for entry in shown) * LETTER + 50
    columns = max(1, int(WIDTH // widest))
    return 10 + LEGEND_LINE * math.ceil(len(shown) / columns)


def _columns(count: int) -> list[list[float]]:
    """Return the x domains of `count` panels side by side, with gaps for axis labels."""
    gap = GAP / (WIDTH - LEFT - RIGHT)
    width = (1 - gap * (count - 1)) / count
    return [[place * (width + gap), place * (width + gap) + width] for place in range(count)]


def _words(panel: Panel, x: Sequence[float], y: Sequence[float], below: int) -> list[Trace]:
    """Return annotations: the title above the panel, and the note in the panel or below it."""
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
    """Wrap the note to the width of a panel, given as a share of the canvas."""
    # The wrapped note must also fit a narrow page.
    letters = int(width * NARROW / SMALL_LETTER)
    return [line for part in panel.note.split("\n") for line in textwrap.wrap(part, letters)]


def _notes_height(panels: Sequence[Panel]) -> int:
    """Return the height in pixels of the notes below a row of panels."""
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
    """Return the base layout of a figure, for light and dark pages."""
    heading = {"text": safe_text(title), "font": {"size": 15}, "x": 0, "xref": "paper", "y": 1}
    place = {"xanchor": "left", "yanchor": "top", "yref": "container", "pad": {"t": 8}}
    under = {"subtitle": {"text": safe_text(remark), "font": {"size": 12}}} if remark else {}
    legend = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"}
    return {
        # No template is used, because Plotly's templates suit either light or dark pages, and
        # labkit's colours suit both.
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


def join_points(traces: Sequence[Trace]) -> list[Trace]:
    """Join traces of one point each into one trace, which a browser draws a hundred times faster.

    The `meta` of a trace names its runs, for the run picker and for linked selection: `run` is the
    key of a trace's only run. `runs` holds the keys of all runs of a line or band. `points` holds
    the keys of the runs of each point. A legend click cannot hide joined points, so this function
    is for figures without a legend.
    """
    others: list[Trace] = []
    single_points: dict[tuple[str | None, ...], list[Trace]] = {}
    for trace in traces:
        # Only traces of single points are joined, because a line through points of several runs
        # would suggest that they belong together.
        is_single_point = len(trace["x"]) == 1 and "lines" not in (trace.get("mode") or "")
        meta = trace.get("meta") or {}
        # A trace with positions on alternative axes stays separate, because buttons move each trace
        # to these positions.
        if is_single_point and "run" in meta and "over" not in meta:
            look = (trace.get("type"), trace.get("mode"), *sorted(set(trace) - _DROPPED))
            single_points.setdefault(look, []).append(dict(trace))
        else:
            others.append(dict(trace))
    return [*others, *(_joined(group) for group in single_points.values())]


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
