"""Plotly figures for notebooks and reports, without network requests and with alternative text."""

from __future__ import annotations

import base64
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
from labkit.figures.kit.still import image

# `CONFIG` removes the buttons that would upload data from Plotly's mode bar.
CONFIG: dict[str, str | bool] = {
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "responsive": True,
}
GRID = "rgba(128,128,128,0.25)"
CLEAR = "rgba(0,0,0,0)"


class Figure(go.Figure):
    """A figure whose notebook output contains Plotly's MIME type, a still picture, and a text.

    Plotly's default output is lost when a notebook is converted to HTML. Plotly's HTML renderers
    are not used, because they load MathJax from a server. JupyterLab and labkit's report draw the
    figure from Plotly's MIME type. Programs that cannot draw the figure show the still picture,
    which is an SVG image. If the figure has trace types without a still picture, such programs show
    the alternative text.
    """

    # The value None makes Jupyter call `_repr_mimebundle_`.
    _ipython_display_: Callable[[], None] | None = None

    @property
    def alt(self) -> str:
        """The alternative text of the figure."""
        return str((self.layout.meta or {}).get("alt", ""))

    @property
    def content(self) -> Trace:
        """Data and layout of the figure, as objects that can be written to JSON."""
        content: Trace = json.loads(self.to_json())
        # The figure's width is set to keep its height in JupyterLab. When its window is resized,
        # JupyterLab resets the height of figures without a width.
        return content | {"layout": {"width": WIDTH} | content["layout"]}

    def _repr_mimebundle_(self, *args: str, **kwargs: str) -> Trace:
        content, words = self.content, f"<p>{escape(self.alt)}</p>"
        bundle: Trace = {
            "application/vnd.plotly.v1+json": content | {"config": CONFIG},
            "text/html": words,
            "text/plain": self.alt,
        }
        if picture := image(content):
            code = base64.b64encode(picture.encode()).decode()
            shown = f'<img src="data:image/svg+xml;base64,{code}" alt="{escape(self.alt)}">'
            # Some programs remove the image, so the text is also present outside of it.
            described = f"<details><summary>Description</summary>{words}</details>"
            bundle["text/html"] = shown + described
        return bundle

    def _repr_html_(self) -> str:
        return str(self._repr_mimebundle_()["text/html"])


def html_page(figure: go.Figure) -> str:
    """Return a figure as an HTML page; the page's metadata names labkit as the generator."""
    # MathJax is excluded, because Plotly would load MathJax from a server. The figures of labkit
    # contain no formulas that need MathJax.
    page: str = figure.to_html(config=CONFIG, include_mathjax=False)
    return page.replace("<head>", '<head><meta name="generator" content="labkit">', 1)


# `WIDTH` is the width of a notebook cell in pixels, `NARROW` the width of a narrow report page.
WIDTH, NARROW = 920, 760
ABOVE = 48  # height in pixels of the title above the axes of a panel
HEAD, REMARK, LEFT, RIGHT, GAP = 40, 30, 62, 16, 84
LEGEND_LINE, NOTE_LINE, LETTER, SMALL_LETTER = 30, 15, 6.4, 5.9

# In a joined trace, each Plotly key in `_BY_POINT` has one value per point.
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
    """Draw rows of panels in one figure, with title and remark above, and a legend below.

    Args:
        rows: Rows of panels, from top to bottom.
        entries: Entries of the legend.
        title, remark, alt: Title, subtitle and alternative text.
        plot: Height of the axes of a panel in pixels.
        below: Height of the labels under the axes in pixels.
    """
    head = HEAD + (REMARK if remark else 0)
    heights = [ABOVE + plot + below + _notes_height(panels) for panels in rows]
    # The legend's height is added to the figure's height, because Plotly would otherwise shrink the
    # panels.
    legend = _legend_height(entries)
    # `inner` is the height in pixels of all panels, which Plotly calls "paper".
    inner = sum(heights)
    figure = Figure()
    layout = base_layout(title, remark, alt) | {"height": head + inner + legend}
    layout["margin"] = {"t": head, "b": legend, "l": LEFT, "r": RIGHT, "pad": 0}
    linked: dict[str, str] = {}
    number = 0
    for row, panels in enumerate(rows):
        top = 1 - (sum(heights[:row]) + ABOVE) / inner
        # Plotly expects positions as fractions of the paper's height, so the pixels are divided by
        # this height.
        y_domain = [top - plot / inner, top]
        for x_domain, panel in zip(_columns(len(panels)), panels, strict=True):
            number += 1
            end = "" if number == 1 else str(number)
            x_axis = axis(panel.x, domain=x_domain, anchor=f"y{end}", **panel.x_axis)
            y_axis = axis(panel.y, domain=y_domain, anchor=f"x{end}", **panel.y_axis)
            # Panels with the same `link` value have linked x axes. Linked x axes follow the x axis
            # of the first panel.
            if panel.link and linked.setdefault(panel.link, f"x{end}") != f"x{end}":
                x_axis["matches"] = linked[panel.link]
            if not panel.traces:
                # A panel with a note instead of data has no axes. Empty axes would suggest that
                # data are missing.
                x_axis["visible"] = y_axis["visible"] = False
            layout |= {f"xaxis{end}": x_axis, f"yaxis{end}": y_axis}
            layout["annotations"] += _words(panel, x_domain, y_domain, below)
            axes = {"xaxis": f"x{end}", "yaxis": f"y{end}"}
            # A figure with more than `MANY` runs has no legend. Without a legend, the runs need no
            # separate traces for clicks.
            traces = panel.traces if len(entries) <= MANY else join_points(panel.traces)
            figure.add_traces([{"type": "scatter"} | trace | axes for trace in traces])
    if switched := [panel.over for panels in rows for panel in panels if panel.over]:
        layout["updatemenus"] = [_switch(figure, switched)]
    if legend and all(isinstance(entry, RunEntry) for entry in entries):
        layout["meta"] |= {"legend": legend}
    if legend:
        # The legend uses separate traces to show each run once. Several panels of a figure may draw
        # the same run.
        figure.add_traces([_legend_trace(entry) for entry in entries])
    figure.update_layout(layout)
    return figure


def _switch(figure: Figure, panels: Sequence[dict[str, Trace]]) -> Trace:
    """Return buttons that switch the panels' x axis, for example from steps to seconds."""
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
    """Return one panel as Plotly data and layout, without the figure's title and legend.

    The function does not create a Plotly `Figure`, because validating a hundred curves takes longer
    than drawing them. If `many` is true, the points of all runs form one trace.
    """
    # In a row of panels, only the first panel shows the row names. A panel that is shown alone
    # always shows its row names.
    named = {name: value for name, value in panel.y_axis.items() if name != "showticklabels"}
    x_axis, y_axis = axis(panel.x, **panel.x_axis), axis(panel.y, **named)
    traces = join_points(panel.traces) if many else panel.traces
    layout = base_layout("", "", panel.title) | {"xaxis": x_axis, "yaxis": y_axis}
    # Plotly's script, unlike Plotly for Python, does not know templates by name, so the layout
    # contains no template.
    del layout["template"]
    layout |= {"height": plot + below + 12, "showlegend": False}
    layout["margin"] = {"t": 12, "b": below, "l": LEFT, "r": RIGHT, "pad": 0}
    layout["meta"] = {"alt": panel.title, "over": panel.over}
    for x_or_y_axis in (x_axis, y_axis):
        x_or_y_axis.setdefault("automargin", True)
    data = ({"type": "scatter"} | {k: v for k, v in t.items() if v is not None} for t in traces)
    return {"data": list(data), "layout": layout}


def _legend_trace(entry: RunEntry | LineStyle) -> Trace:
    """Return a trace that adds an entry to the legend, but draws no points."""
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
    """Return the x positions of `count` panels side by side, with gaps for axis labels."""
    gap = GAP / (WIDTH - LEFT - RIGHT)
    width = (1 - gap * (count - 1)) / count
    return [[place * (width + gap), place * (width + gap) + width] for place in range(count)]


def _words(panel: Panel, x: Sequence[float], y: Sequence[float], below: int) -> list[Trace]:
    """Return annotations: the title above a panel, and the note inside or below the panel."""
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
    """Wrap the note to a panel's width, which is a fraction of the figure's width."""
    # The note is wrapped for the narrow page width, so that it fits both page widths.
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
    """Return the layout that all figures have in common, for light and dark pages."""
    heading = {"text": safe_text(title), "font": {"size": 15}, "x": 0, "xref": "paper", "y": 1}
    place = {"xanchor": "left", "yanchor": "top", "yref": "container", "pad": {"t": 8}}
    under = {"subtitle": {"text": safe_text(remark), "font": {"size": 12}}} if remark else {}
    legend = {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"}
    return {
        # No template is used, because a Plotly template suits either light or dark pages. The
        # colours of labkit suit both light and dark pages.
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
    """Join single-point traces into one trace, which a browser draws a hundred times faster.

    The `meta` of a trace contains the keys of its runs. The list of runs above the figures and the
    linked selection use these keys. If the trace has only one run, `run` in `meta` is the key of
    the run. In `meta`, `runs` contains the keys of all runs that a line or band represents. In
    `meta`, `points` contains the keys of the runs for each point. Use this function only for
    figures without a legend, because a legend click cannot hide joined points.
    """
    others: list[Trace] = []
    single_points: dict[tuple[str | None, ...], list[Trace]] = {}
    for trace in traces:
        # The function joins traces of one point each, but no lines. A line through points of
        # several runs would suggest a connection between the runs.
        is_single_point = len(trace["x"]) == 1 and "lines" not in (trace.get("mode") or "")
        meta = trace.get("meta") or {}
        # Traces with positions on alternative axes are not joined, because buttons move each trace
        # separately.
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
