"""Interactive figures in JupyterLab: live training curves, and linked selection of runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape, unescape
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.common.imports import require
from labkit.figures.kit.entries import DASHES, PALETTE, safe_text
from labkit.figures.kit.panels import Trace

if TYPE_CHECKING:
    import ipywidgets

    from labkit.figures.kit.canvas import Figure

MOST = 400  # A live curve that reaches this number of points averages neighbouring points.
# The parts of a step have the same colours as in `timeline`; hatches make them distinguishable
# without colour.
PARTS = {
    "compute": ("#56B4E9", ""),
    "codec": ("#009E73", "/"),
    "communicate": ("#0072B2", "x"),
    "wait": ("#E69F00", "."),
}
METRICS = ("#009E73", "#CC79A7", "#56B4E9", "#0072B2")
HELD_OUT_LOSS = "#D55E00"
_NO_METRICS = (
    "epoch",
    "step",
    "seconds",
    "loss",
    "val_loss",
)  # fields of an epoch's record that contain no metrics

_MIB = 2**20
_HEIGHT = 560


@dataclass
class LiveCurve:
    """A curve that grows point by point and stores at most `MOST` points.

    Attributes:
        x, y: Coordinates of the points.
        values_per_point: Number of consecutive values that are averaged to one point.
    """

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    values_per_point: int = 1
    _next: list[tuple[float, float]] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """Add a value to the curve, unless its y coordinate is not finite."""
        if not math.isfinite(y):
            return
        self._next.append((x, y))
        if len(self._next) < self.values_per_point:
            return
        self.x.append(sum(point[0] for point in self._next) / self.values_per_point)
        self.y.append(sum(point[1] for point in self._next) / self.values_per_point)
        self._next.clear()
        if len(self.x) == MOST:
            # When a curve is full, neighbouring points are averaged, so that the whole training
            # stays visible.
            self.x, self.y = _averaged_pairs(self.x), _averaged_pairs(self.y)
            # When points are averaged, the number of values per new point doubles, which limits
            # memory and drawing time.
            self.values_per_point *= 2


class LiveFigure:
    """A live figure of loss and metrics, and of each rank's speed, sent bytes and step parts.

    Args:
        label: Label of the experiment, for the title.
        workers: Number of ranks.
        clock: Name of the clock that measures the times, "wall" or "virtual".

    Attributes:
        screen: Display area of the figure in a notebook.
    """

    def __init__(self, label: str, workers: int, clock: str = "wall") -> None:
        require("widgets")
        from labkit.figures.kit.screen import FigureScreen

        self.workers = workers
        self._curves = {
            (what, rank): LiveCurve()
            for what in ("loss", "speed", "sent")
            for rank in range(workers)
        }
        self._metrics: dict[str, LiveCurve] = {}
        self._sent = [0.0] * workers
        self._traces, self._layout = _traces(workers), _layout(label, clock)
        self.screen = FigureScreen({"data": self._traces, "layout": self._layout})

    def add(
        self,
        rows: Iterable[Mapping[str, float]],
        epochs: Iterable[Mapping[str, float]],
        shares: Mapping[int, Mapping[str, float]],
        ended: bool = False,
    ) -> None:
        """Add new data to the curves, and redraw the figure.

        Args:
            rows: New rows of the run's history, one row per step and rank.
            epochs: Metrics of the epochs that have been completed since the last call.
            shares: For each rank, the fraction of time that each part of a step takes. The
                fractions of time are numbers from 0 to 1.
            ended: Whether the training has ended, so that no more data follow.
        """
        for row in rows:
            self._row(row)
        for epoch in epochs:
            self._epoch(epoch)
        # The traces of metrics are created here, at every update of the figure. The names of
        # metrics are unknown before the end of the first epoch.
        metrics = [_metric(name, place) for place, name in enumerate(self._metrics)]
        data = [self._with_data(trace, shares) for trace in [*self._traces, *metrics]]
        self.screen.show({"data": data, "layout": self._layout}, ended)

    def _row(self, row: Mapping[str, float]) -> None:
        rank, step = int(row["rank"]), row["step"] + 1
        self._curves["loss", rank].add(step, row["loss"])
        speed = row["samples"] / max(row["seconds"], 1e-9)
        # If a rank has no samples in a step, the curve omits its speed. A speed of zero would
        # distort the mean speed.
        self._curves["speed", rank].add(step, speed or math.nan)
        self._sent[rank] += row.get("wire_bytes", 0) / _MIB
        self._curves["sent", rank].add(step, self._sent[rank])

    def _epoch(self, epoch: Mapping[str, float]) -> None:
        shown = {name: value for name, value in epoch.items() if name not in _NO_METRICS}
        if "val_loss" in epoch:
            shown["held-out loss"] = epoch["val_loss"]
        for name, value in shown.items():
            named = f"held-out {name[4:]}" if name.startswith("val_") else name
            self._metrics.setdefault(named, LiveCurve()).add(epoch["step"], value)

    def _with_data(self, trace: Trace, shares: Mapping[int, Mapping[str, float]]) -> Trace:
        if trace["type"] == "bar":
            share = [shares.get(rank, {}).get(trace["name"], 0.0) for rank in range(self.workers)]
            return trace | {"x": [100 * fraction for fraction in share]}
        quantity, rank = trace["meta"]  # for a metric: its name in place of a rank
        curve = self._metrics[rank] if quantity == "metric" else self._curves[quantity, rank]
        return trace | {"x": [*curve.x], "y": [*curve.y]}


def _averaged_pairs(values: list[float]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]


def _traces(workers: int) -> list[Trace]:
    places = {"loss": "", "speed": "3", "sent": "4"}
    curves = [
        {
            "type": "scatter",
            "mode": "lines",
            "meta": [quantity, rank],
            "x": [],
            "y": [],
            "name": f"rank {rank}",
            "legendgroup": f"rank {rank}",
            "showlegend": quantity == "loss",
            "line": {
                "color": PALETTE[rank % len(PALETTE)],
                "dash": DASHES[rank // len(PALETTE) % len(DASHES)],
                "width": 1.5,
            },
            "xaxis": f"x{place}",
            "yaxis": f"y{place}",
        }
        for quantity, place in places.items()
        for rank in range(workers)
    ]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": [0.0] * workers,
            "y": [f"rank {rank}" for rank in range(workers)],
            "marker": {"color": color, "pattern": {"shape": shape}},
            "hovertemplate": "%{y}: %{x:.0f} % " + part + "<extra></extra>",
            "xaxis": "x5",
            "yaxis": "y5",
        }
        for part, (color, shape) in PARTS.items()
    ]
    return curves + bars


def _metric(name: str, place: int) -> Trace:
    beside_loss = name == "held-out loss"
    end = "" if beside_loss else "2"
    color = HELD_OUT_LOSS if beside_loss else METRICS[place % len(METRICS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "meta": ["metric", name],
        "name": safe_text(name),
        "line": {"color": color, "dash": "dot" if name.startswith("held-out") else "solid"},
        "marker": {"size": 5, "symbol": "diamond" if name.startswith("held-out") else "circle"},
        "xaxis": f"x{end}",
        "yaxis": f"y{end}",
    }


def _layout(label: str, clock: str) -> Trace:
    from labkit.figures.kit.canvas import WIDTH, axis, base_layout

    layout = base_layout(f"{label} · {clock} clock", "", "")
    layout |= {"width": WIDTH, "height": _HEIGHT, "barmode": "stack", "uirevision": "kept"}
    layout["margin"] = {"t": 40, "b": 90, "l": 62, "r": 16}
    wide, third = ([0.0, 0.46], [0.54, 1.0]), ([0.0, 0.27], [0.37, 0.64], [0.76, 1.0])
    upper, lower = [0.58, 1.0], [0.0, 0.38]
    panels = [
        ("step", "loss of the batch of a rank", wide[0], upper),
        ("step", "metrics after each epoch", wide[1], upper),
        ("step", "samples/s of a rank", third[0], lower),
        ("step", "MiB sent by a rank", third[1], lower),
        ("% of step time, last 50 steps", "", third[2], lower),
    ]
    for number, (x, y, across, up) in enumerate(panels, 1):
        end = "" if number == 1 else str(number)
        layout[f"xaxis{end}"] = axis(x, domain=across, anchor=f"y{end}")
        layout[f"yaxis{end}"] = axis(y, domain=up, anchor=f"x{end}")
    layout["xaxis5"]["range"] = [0, 100]
    layout["yaxis5"]["autorange"] = "reversed"
    for end in ("3", "4"):
        layout[f"yaxis{end}"]["rangemode"] = "tozero"
    return layout


_NO_RUN = "no run"


class LinkedFigures:
    """Figures with a common selection of runs; without JupyterLab, they are plain figures."""

    def __init__(self, *figures: Figure) -> None:
        if not figures:
            raise InvalidInput(
                "linked_selection() was called without figures: give figures, such as "
                "lk.compare(runs), figures.pareto(runs)"
            )
        self.figures = figures
        self.labels = {key: label for figure in figures for key, label in _runs(figure)}

    def widget(self) -> ipywidgets.VBox:
        """Return a widget that contains a list of the runs, with the figures below the list.

        A click on the line, the marker or the legend entry of a run selects the run. A second click
        on the same run deselects it.
        """
        require("widgets")
        import ipywidgets
        import traitlets

        from labkit.figures.kit.screen import FigureScreen

        # The list entry with an empty key deselects every run.
        options = [(_NO_RUN, ""), *((label, key) for key, label in self.labels.items())]
        choice = ipywidgets.Dropdown(options=options, value="", description="stands out:")
        panels = []
        for figure in self.figures:
            screen = FigureScreen(figure.content, words=f"<p>{escape(figure.alt)}</p>")
            screen.show(screen.content, ended=True)
            traitlets.link((choice, "value"), (screen.plot, "chosen"))
            panels.append(screen.widget)
        return ipywidgets.VBox([choice, *panels])

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # In the output of a job, plain figures are shown, because widgets need a running kernel.
        shown = self.figures if "LABKIT_JOB" in os.environ else [self.widget()]
        for item in shown:
            display(item)


def linked_selection(*figures: Figure) -> LinkedFigures:
    """Show figures with linked selection: a run selected in one figure is highlighted in all.

    The user selects a run by a click on its line, marker or legend entry. A click in the list above
    the figures also selects a run. A second click on the same run deselects it. The output of
    `labkit run` contains plain figures. `labkit report` links figures by its own script.

    Raises:
        InvalidInput: There are no figures.
    """
    return LinkedFigures(*figures)


def _runs(figure: Figure) -> Iterator[tuple[str, str]]:
    """Yield the key and the label of each run that has a separate trace."""
    for trace in figure.data:
        if "run" in (trace.meta or {}):
            yield trace.meta["run"], unescape(trace.name)
