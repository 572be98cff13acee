"""The panel of a Live in JupyterLab: figure, progress, what each rank does, and a stop button."""

from __future__ import annotations

from html import escape

import ipywidgets

from labkit.cluster.run_progress import PARTS, ProgressView
from labkit.common.html import table
from labkit.common.privacy import scrub
from labkit.common.units import bytes_text, duration_text
from labkit.common.widgets import button, meter, status
from labkit.figures.runs.growing import LiveFigure
from labkit.records.run import Run, key_metrics, shown, verdict

WHAT_STOP_DOES = "End training after the same step on all ranks; the run is kept as interrupted"


class Panel:
    """Widgets that show a Live; they hold no more than it has told so far.

    Attributes:
        widget: all of it.
        stop: the button that ends training.
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
        """Draw what has come since the last time."""
        rows, epochs = live.rows[self._rows :], live.epochs[self._epochs :]
        # Only what is new is drawn: a figure that were made anew each time would lose its zoom.
        self._rows, self._epochs = self._rows + len(rows), self._epochs + len(epochs)
        run = live.run
        if rows or epochs or run is not None:
            shares = {number: rank.shares for number, rank in live.tally.ranks.items()}
            self.figure.add(rows, epochs, shares, ended=run is not None)
        self._progress.value = _progress(live)
        self._status.value = status(live.tally.doing if run is None else _end(run))
        if run is not None:
            self.stop.disabled = True

    close = draw

    def _stop(self) -> None:
        self._live.stop()
        self.stop.description, self.stop.disabled = "Stopping …", True


def _progress(live: ProgressView) -> str:
    """The bar, how far and how long yet, and a line a rank."""
    tally, outline = live.tally, live.outline
    said = [f"epoch {tally.epoch + 1} of {outline.epochs}", f"step {tally.steps}"]
    if live.run is None and tally.seconds_left is not None:
        said.append(f"about {duration_text(tally.seconds_left)} left")
    rows = [
        [
            f"rank {number}",
            "" if rank.speed is None else f"{rank.speed:,.0f}",
            bytes_text(rank.sent),
            *(f"{rank.shares[part]:.0%}" for part in PARTS),
        ]
        for number, rank in sorted(tally.ranks.items())
    ]
    head = ["", "samples/s", "sent", *PARTS]
    bar = meter(tally.share, "share of the training steps that are done")
    return f"{bar}<div>{escape(' · '.join(said))}</div>{table(rows, head) if rows else ''}"


def _end(run: Run) -> str:
    """State, the gate's verdict and the key figures, in one line."""
    state = run.status
    said = [state["state"]]
    if state.get("cause"):
        rank = "" if state.get("rank") is None else f"rank {state['rank']}: "
        said.append(f"{rank}{scrub(str(state['cause']))}")
    if run.metrics:
        said.append(f"gate: {verdict(run)}")
        said += [f"{name} {shown(value)}" for name, value in key_metrics(run).items()]
    return " · ".join(said)
