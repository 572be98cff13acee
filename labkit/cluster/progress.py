"""What a person sees while ranks work: a line in a terminal, a growing figure in JupyterLab."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any, Protocol

from labkit.experiment import Experiment

Rows = list[dict[str, float]]


class Progress(Protocol):
    """Takes rows as they come."""

    def update(self, rows: Rows) -> None:
        """Show what these rows add."""

    def close(self) -> None:
        """Nothing more will come."""


def progress(experiment: Experiment) -> Progress:
    """The display that fits where this process runs."""
    if "LABKIT_JOB" in os.environ:  # a batch job: its log wants whole lines, not many
        return Line(experiment, every=5.0, end="\n")
    if _in_notebook():
        return Figure(experiment)
    if sys.stderr.isatty():
        return Line(experiment, every=0.2, end="")
    return Line(experiment, every=5.0, end="\n")


class Line:
    """One line: step, loss, and samples per second of each rank."""

    def __init__(self, experiment: Experiment, every: float, end: str) -> None:
        self.experiment, self.every, self.end = experiment, every, end
        self._shown_at, self._text = 0.0, ""
        self._speed: dict[int, float] = {}
        self._loss = math.nan

    def update(self, rows: Rows) -> None:
        """Rewrite the line, at most every so many seconds."""
        for row in rows:
            # Of a model in parts one rank alone knows the loss, and counts the samples.
            if row["samples"]:
                self._speed[int(row["rank"])] = row["samples"] / max(row["seconds"], 1e-9)
            if not math.isnan(row["loss"]):
                self._loss = row["loss"]
        last = rows[-1]
        speeds = "  ".join(f"rank {r} {s:,.0f}/s" for r, s in sorted(self._speed.items()))
        self._text = (
            f"{self.experiment.label}  epoch {last['epoch'] + 1:.0f}/{self.experiment.epochs}  "
            f"step {last['step'] + 1:.0f}  loss {self._loss:.4f}  {speeds}"
        )
        if time.monotonic() - self._shown_at > self.every:
            self._print(self.end)

    def close(self) -> None:
        """Leave the last line standing."""
        if self._text:
            self._print("\n")

    def _print(self, end: str) -> None:
        self._shown_at = time.monotonic()
        lead = "" if self.end else "\r\x1b[2K"
        print(f"{lead}{self._text}", end=end, file=sys.stderr, flush=True)


class Figure:
    """A FigureWidget: loss and samples per second of each rank, growing while ranks work."""

    def __init__(self, experiment: Experiment) -> None:
        from IPython.display import display

        from labkit.figures import live_figure

        self.widget: Any = live_figure(experiment.label, experiment.workers)
        display(self.widget)

    def update(self, rows: Rows) -> None:
        """Add the rows to their rank's curves."""
        workers = len(self.widget.data) // 2
        with self.widget.batch_update():
            for rank in range(workers):
                own = [row for row in rows if row["rank"] == rank]
                if not own:
                    continue
                steps = [row["step"] for row in own]
                for trace, values in (
                    (self.widget.data[rank], [row["loss"] for row in own]),
                    (self.widget.data[workers + rank], [r["samples"] / r["seconds"] for r in own]),
                ):
                    trace.x = (*(trace.x or ()), *steps)
                    trace.y = (*(trace.y or ()), *values)

    def close(self) -> None:
        """The figure stays as it is."""


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
