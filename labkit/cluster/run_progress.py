"""Progress of a running experiment, computed from its history rows: steps, speed, time left.

This module also defines the protocols that displays use, so that displays need not import
RunHandle.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from labkit.common.terminal import status_line
from labkit.records.run import Run
from labkit.records.stream import Message

# labkit computes the speed and the time shares of a rank over its latest 50 steps (WINDOW).
WINDOW = 50
# The dictionary PARTS maps each part of a step's time to its column in the run's history.
PARTS = {
    "compute": "compute_seconds",
    "codec": "codec_seconds",
    "communicate": "communicate_seconds",
    "wait": "wait_seconds",
}

# A `Row` contains the history values of one step, or the metrics after an epoch.
Row = dict[str, float]


@dataclass(frozen=True)
class Outline:
    """Label, number of workers and epochs, and clock of an experiment, for progress displays."""

    label: str
    workers: int
    epochs: int
    clock: str = "wall"


@dataclass
class RankProgress:
    """The progress of one rank.

    Attributes:
        last: The latest history rows of the rank, at most `WINDOW` rows.
        steps: Number of steps that the rank has completed.
        sent: Total bytes that the rank has sent over network links.
    """

    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: int = 0
    sent: float = 0.0

    def add(self, row: Row) -> None:
        """Add the history row of one more step."""
        self.last.append(row)
        self.steps += 1
        self.sent += row.get("wire_bytes", 0)

    @property
    def speed(self) -> float | None:
        """Samples/s; None for a rank that counts no samples, e.g. one shard of a split model."""
        samples = sum(row["samples"] for row in self.last)
        seconds = sum(row["seconds"] for row in self.last)
        return samples / max(seconds, 1e-9) if samples else None

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the step time that each component takes in the latest steps; the sum is 1."""
        spent = {name: sum(row.get(key, 0) for row in self.last) for name, key in PARTS.items()}
        total = sum(spent.values())
        return {name: seconds / total if total else 0.0 for name, seconds in spent.items()}


class RunProgress:
    """The progress of all ranks, computed from the messages of the ranks.

    Args:
        epochs: Total number of epochs of the experiment.
        clock: Function that returns the current time in seconds.

    Attributes:
        ranks: Progress of each rank, by rank number.
        doing: Current activity of the ranks, such as "training".
        loss: Latest loss that any rank has reported.
        steps_per_epoch: Number of steps per epoch, or None while the number is unknown.
    """

    def __init__(self, epochs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.epochs, self._clock = epochs, clock
        # `_first` and `_last` are pairs of a time and a number of steps. The number in `_first` and
        # `_last` is the mean over the ranks.
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)
        self._ended = 0  # `_ended` is the number of epochs that all ranks have completed.
        self.ranks: dict[int, RankProgress] = {}
        self.doing = "starting"
        self.loss = math.nan
        self.epoch = 0
        self.steps_per_epoch: int | None = None

    def add(self, messages: Iterable[Message]) -> None:
        """Update the progress from new messages of the ranks, see `labkit.records.stream`."""
        for kind, record in messages:
            if kind == "doing":
                self.doing = record["what"]
            elif kind == "plan":
                self.steps_per_epoch = record["steps"]
            elif kind == "epoch":
                self._ended = record["epoch"] + 1
                # Without a "plan" message, the number of steps per epoch is known only after the
                # first epoch.
                self.steps_per_epoch = self.steps_per_epoch or record["step"]
            elif kind == "step":
                self._step(record)
        if self._mean_steps > self._last[1]:
            self._last = self._clock(), self._mean_steps
            # The speed is measured from the end of the first step. In the first step, TensorFlow
            # also traces the model.
            self._first = self._first or self._last

    def _step(self, row: Row) -> None:
        self.ranks.setdefault(int(row["rank"]), RankProgress()).add(row)
        # A fast worker may be past the last epoch, so the epoch number is limited.
        self.epoch = min(max(self.epoch, int(row["epoch"])), self.epochs - 1)
        if not math.isnan(row["loss"]):
            self.loss = row["loss"]

    @property
    def steps(self) -> int:
        """Number of steps that every rank has completed, i.e. the steps of the slowest rank."""
        return min((rank.steps for rank in self.ranks.values()), default=0)

    @property
    def _mean_steps(self) -> float:
        """Mean number of completed steps per rank; asynchronous ranks may differ in step count."""
        return sum(rank.steps for rank in self.ranks.values()) / max(1, len(self.ranks))

    @property
    def share(self) -> float | None:
        """Completed share of training, from 0 to 1; None until the length of an epoch is known."""
        if not self.steps_per_epoch:
            return None
        # Ranks may complete fewer steps in an epoch than planned, because late gradients are
        # dropped.
        completed = max(self._mean_steps, self._ended * self.steps_per_epoch)
        return min(1.0, completed / (self.steps_per_epoch * self.epochs))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until training ends, computed from the speed without the first steps.

        The first steps are not included in the speed, because they include tracing and compilation.
        """
        if self._first is None or self.share is None:
            return None
        seconds, steps = (now - then for now, then in zip(self._last, self._first, strict=True))
        remaining = (1 - self.share) * (self.steps_per_epoch or 0) * self.epochs
        return remaining * seconds / steps if steps else None


class ProgressView(Protocol):
    """The interface by which displays read a running experiment; RunHandle implements it."""

    rows: list[Row]
    epochs: list[Row]
    progress: RunProgress

    @property
    def outline(self) -> Outline:
        """Label, workers, epochs and clock of the experiment."""

    @property
    def run(self) -> Run | None:
        """The record of the run after the run has ended; None while the run is active."""

    def stop(self) -> None:
        """Ask all ranks to stop training after the same step."""


class Display(Protocol):
    """A display of a running experiment."""

    def draw(self, live: ProgressView) -> None:
        """Show the current state of the experiment."""

    def close(self, live: ProgressView) -> None:
        """Show how the run ended; afterwards the display receives no further call."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook that can show widgets."""
    if "LABKIT_JOB" in os.environ or "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def line() -> ProgressLine:
    """Return a progress display for a terminal, or for a log file."""
    if sys.stderr.isatty() and "LABKIT_JOB" not in os.environ:
        return ProgressLine(every=0.2, end="")
    return ProgressLine(every=5.0, end="\n")


class ProgressLine:
    """A line of text with the step, the loss, the samples/s of each rank, and the time left."""

    def __init__(self, every: float, end: str) -> None:
        self.every, self.end = every, end
        self._shown_at, self._shown = 0.0, ""

    def draw(self, live: ProgressView) -> None:
        """Rewrite the line at most once in `every` seconds."""
        if time.monotonic() - self._shown_at > self.every:
            self._print(live, self.end)

    def close(self, live: ProgressView) -> None:
        """Print the run's last progress line, with a line break."""
        self._print(live, "\n")

    def _print(self, live: ProgressView, end: str) -> None:
        text = _text(live)
        # An unchanged line is not printed again, because it would fill a log.
        if not live.rows or text + end == self._shown:
            return
        self._shown_at, self._shown = time.monotonic(), text + end
        lead = "" if self.end else "\r\x1b[2K"
        shown = text if end else status_line(text)
        print(f"{lead}{shown}", end=end, file=sys.stderr, flush=True)


def _text(live: ProgressView) -> str:
    progress, outline = live.progress, live.outline
    speeds = [f"rank {n} {r.speed:,.0f}/s" for n, r in sorted(progress.ranks.items()) if r.speed]
    seconds_left = progress.seconds_left
    return "  ".join(
        [
            f"{outline.label}  epoch {progress.epoch + 1}/{outline.epochs}",
            f"step {progress.steps}  loss {progress.loss:.4f}",
            *speeds,
            *([f"{seconds_left:.0f} s left"] if seconds_left and live.run is None else []),
        ]
    )
