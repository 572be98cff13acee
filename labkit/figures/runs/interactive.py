"""Figures that change in JupyterLab: live curves of a training, and linked selection of runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape, unescape
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.figures.kit.entries import DASHES, PALETTE
from labkit.figures.kit.panels import Trace

if TYPE_CHECKING:
    import ipywidgets

    from labkit.figures.kit.canvas import Figure

MOST = 400  # points of a curve; of more, neighbours are averaged
# Colours of `timeline`; patterns distinguish the parts without colour, too.
PARTS = {
    "compute": ("#56B4E9", ""),
    "codec": ("#009E73", "/"),
    "communicate": ("#0072B2", "x"),
    "wait": ("#E69F00", "."),
}
METRICS = ("#009E73", "#CC79A7", "#56B4E9", "#0072B2")
HELD_OUT_LOSS = "#D55E00"
_BESIDE = ("epoch", "step", "seconds", "loss", "val_loss")  # of an epoch, but no metric

_MIB = 2**20
_HEIGHT = 560


@dataclass
class Curve:
    """Points that come one by one, and are kept in so many."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    each: int = 1  # how many make a point
    _next: list[tuple[float, float]] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """Add a point; values that are not finite are left out."""
        if not math.isfinite(y):
            return
        self._next.append((x, y))
        if len(self._next) < self.each:
            return
        self.x.append(sum(point[0] for point in self._next) / self.each)
        self.y.append(sum(point[1] for point in self._next) / self.each)
        self._next.clear()
        if len(self.x) == MOST:
            # Halved, not cut: the whole course of the training stays in view.
            self.x, self.y = _halved(self.x), _halved(self.y)
            # The points now stand for twice as many; so memory and drawing stay bounded in a long
            # run.
            self.each *= 2


class LiveFigure:
    """Loss, metrics, speed, bytes sent, and the shares of a step, of each rank.

    Args:
        label: of the experiment.
        workers: ranks.
        clock: "wall" or "virtual".

    Attributes:
        screen: shows it in a notebook.
    """

    def __init__(self, label: str, workers: int, clock: str = "wall") -> None:
        from labkit.figures.kit.screen import Screen

        self.workers = workers
        self._curves = {
            (what, rank): Curve() for what in ("loss", "speed", "sent") for rank in range(workers)
        }
        self._metrics: dict[str, Curve] = {}
        self._sent = [0.0] * workers
        self._traces, self._layout = _traces(workers), _layout(label, clock)
        self.screen = Screen({"data": self._traces, "layout": self._layout})

    def add(
        self,
        rows: Iterable[Mapping[str, float]],
        epochs: Iterable[Mapping[str, float]],
        shares: Mapping[int, Mapping[str, float]],
        ended: bool = False,
    ) -> None:
        """Draw what has come.

        Args: rows of the history; metrics after epochs; which part of its time each rank
        spends on what, from 0 to 1; whether nothing more will come.
        """
        for row in rows:
            self._row(row)
        for epoch in epochs:
            self._epoch(epoch)
        # Which metrics there are is known when the first epoch has ended.
        metrics = [_metric(name, place) for place, name in enumerate(self._metrics)]
        data = [self._filled(trace, shares) for trace in [*self._traces, *metrics]]
        self.screen.show({"data": data, "layout": self._layout}, ended)

    def _row(self, row: Mapping[str, float]) -> None:
        rank, step = int(row["rank"]), row["step"] + 1
        self._curves["loss", rank].add(step, row["loss"])
        speed = row["samples"] / max(row["seconds"], 1e-9)
        # A step without rows of this rank has no speed; a 0 would pull the curve down.
        self._curves["speed", rank].add(step, speed or math.nan)
        self._sent[rank] += row.get("wire_bytes", 0) / _MIB
        self._curves["sent", rank].add(step, self._sent[rank])

    def _epoch(self, epoch: Mapping[str, float]) -> None:
        shown = {name: value for name, value in epoch.items() if name not in _BESIDE}
        if "val_loss" in epoch:
            shown["held-out loss"] = epoch["val_loss"]
        for name, value in shown.items():
            named = f"held-out {name[4:]}" if name.startswith("val_") else name
            self._metrics.setdefault(named, Curve()).add(epoch["step"], value)

    def _filled(self, trace: Trace, shares: Mapping[int, Mapping[str, float]]) -> Trace:
        if trace["type"] == "bar":
            share = [shares.get(rank, {}).get(trace["name"], 0.0) for rank in range(self.workers)]
            return trace | {"x": [100 * each for each in share]}
        what, rank = trace["meta"]
        curve = self._metrics[trace["name"]] if what == "metric" else self._curves[what, rank]
        return trace | {"x": [*curve.x], "y": [*curve.y]}


def _halved(values: list[float]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]


def _traces(workers: int) -> list[Trace]:
    places = {"loss": "", "speed": "3", "sent": "4"}
    curves = [
        {
            "type": "scatter",
            "mode": "lines",
            "meta": [what, rank],
            "x": [],
            "y": [],
            "name": f"rank {rank}",
            "legendgroup": f"rank {rank}",
            "showlegend": what == "loss",
            "line": {
                "color": PALETTE[rank % len(PALETTE)],
                "dash": DASHES[rank // len(PALETTE) % len(DASHES)],
                "width": 1.5,
            },
            "xaxis": f"x{place}",
            "yaxis": f"y{place}",
        }
        for what, place in places.items()
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
        "meta": ["metric", 0],
        "name": name,
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
        ("step", "loss of the rank's batch", wide[0], upper),
        ("step", "metrics after an epoch", wide[1], upper),
        ("step", "samples/s of the rank", third[0], lower),
        ("step", "MiB sent by the rank", third[1], lower),
        ("% of its time, last 50 steps", "", third[2], lower),
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


_NOBODY = "no run"


class LinkedFigures:
    """Figures with linked selection: widgets in JupyterLab, elsewhere the figures themselves."""

    def __init__(self, *figures: Figure) -> None:
        if not figures:
            raise InvalidInput(
                "linked_selection() without figures: give those of lk.compare, figures.pareto"
            )
        self.figures = figures
        self.labels = {key: label for figure in figures for key, label in _runs(figure)}

    def widget(self) -> ipywidgets.VBox:
        """Return the figures below each other, under a list of the runs.

        A click on a run's line, marker or name in a legend chooses it, a second one lets it go.
        """
        import ipywidgets
        import traitlets

        from labkit.figures.kit.screen import Screen

        # The empty key selects no run.
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


def linked_selection(*figures: Figure) -> LinkedFigures:
    """Show figures whose runs select together: choose one in any of them, and all highlight it.

    A click on its line, its marker or its name in a legend chooses a run, and so does the list
    above the figures; a second click lets it go. In the output of `labkit run` they are plain
    figures, which `labkit report` links by its own script.

    Raises: InvalidInput, no figures.
    """
    return LinkedFigures(*figures)


def _runs(figure: Figure) -> Iterator[tuple[str, str]]:
    """Yield keys and labels of the runs that have traces of their own."""
    for trace in figure.data:
        if "run" in (trace.meta or {}):
            yield trace.meta["run"], unescape(trace.name)
