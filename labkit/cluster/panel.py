"""The panel of a RunHandle in JupyterLab: figure, progress, table of ranks, and a stop button."""

from __future__ import annotations

from html import escape

import ipywidgets

from labkit.cluster.run_progress import PARTS, ProgressView
from labkit.common.html import table
from labkit.common.privacy import scrub
from labkit.common.units import bytes_text, duration_text
from labkit.common.widgets import button, meter, status
from labkit.figures.runs.interactive import LiveFigure
from labkit.records.run import Run, key_metrics, metric_text, verdict

WHAT_STOP_DOES = "End training after the same step on all ranks; the run is recorded as interrupted"


class LivePanel:
    """The widgets that show a running experiment in JupyterLab.

    Attributes:
        widget: The outer widget, which contains the other widgets.
        stop: The button that ends training.
    """

    def __init__(self, live: ProgressView) -> None:
        self._live, self._rows, self._epochs = live, 0, 0
        self.figure = LiveFigure(live.outline.label, live.outline.workers, live.outline.clock)
        self.stop = button("Stop training", WHAT_STOP_DOES, "stop", self._stop)
        self._status, self._progress = ipywidgets.HTML(), ipywidgets.HTML()
        self._progress.layout.flex = "1 1 auto"
        top = ipywidgets.HBox([self.stop, self._progress])
        top.layout.align_items = "flex-start"
        self.widget = ipywidgets.VBox([self._status, top, self.figure.screen.widget])
        self.widget.add_class("labkit-live")

    def draw(self, live: ProgressView) -> None:
        """Draw the history rows that have been added since the last call."""
        rows, epochs = live.rows[self._rows :], live.epochs[self._epochs :]
        # The panel adds new rows to its figure, because a new figure would lose the user's zoom.
        self._rows, self._epochs = self._rows + len(rows), self._epochs + len(epochs)
        run = live.run
        if rows or epochs or run is not None:
            shares = {number: rank.shares for number, rank in live.progress.ranks.items()}
            self.figure.add(rows, epochs, shares, ended=run is not None)
        self._progress.value = _progress(live)
        self._status.value = status(live.progress.doing if run is None else _end(run))
        if run is not None:
            self.stop.disabled = True

    close = draw

    def _stop(self) -> None:
        self._live.stop()
        self.stop.description, self.stop.disabled = "Stopping …", True


def _progress(live: ProgressView) -> str:
    """Return HTML with a progress bar, the remaining time, and a table with one row per rank."""
    progress, outline = live.progress, live.outline
    parts = [f"epoch {progress.epoch + 1} of {outline.epochs}", f"step {progress.steps}"]
    if live.run is None and progress.seconds_left is not None:
        parts.append(f"about {duration_text(progress.seconds_left)} left")
    rows = [
        [
            f"rank {number}",
            "" if rank.speed is None else f"{rank.speed:,.0f}",
            bytes_text(rank.sent),
            *(f"{rank.shares[part]:.0%}" for part in PARTS),
        ]
        for number, rank in sorted(progress.ranks.items())
    ]
    head = ["", "samples/s", "sent", *PARTS]
    bar = meter(progress.share, "share of the training steps that are completed")
    return f"{bar}<div>{escape(' · '.join(parts))}</div>{table(rows, head) if rows else ''}"


def _end(run: Run) -> str:
    """Return the run's state, the result of its verification and key metrics in one line."""
    state = run.status
    parts = [state["state"]]
    if state.get("cause"):
        rank = "" if state.get("rank") is None else f"rank {state['rank']}: "
        parts.append(f"{rank}{scrub(str(state['cause']))}")
    if run.metrics:
        parts.append(f"equivalence: {verdict(run)}")
        parts += [f"{name} {metric_text(value)}" for name, value in key_metrics(run).items()]
    return " · ".join(parts)
