"""Progress of a running experiment, computed from its history rows: steps, speed, time left.

This module also defines the protocols for displays, so that displays need not import RunHandle.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from labkit.records.run import Run
from labkit.records.stream import Message

WINDOW = 50  # number of latest steps over which speed and time shares are averaged
# These are the parts of a step's time and their columns in a history row.
PARTS = {
    "compute": "compute_seconds",
    "codec": "codec_seconds",
    "communicate": "communicate_seconds",
    "wait": "wait_seconds",
}

Row = dict[str, float]  # a history row, or the metrics after an epoch


@dataclass(frozen=True)
class Outline:
    """The facts about an experiment that displays need and that its record contains."""

    label: str
    workers: int
    epochs: int
    clock: str = "wall"


@dataclass
class RankProgress:
    """The progress of one rank.

    Attributes:
        last: The rank's latest history rows, at most `WINDOW`.
        steps: Number of steps that the rank has completed.
        sent: Total bytes that the rank has sent over network links.
    """

    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: int = 0
    sent: float = 0.0

    def add(self, row: Row) -> None:
        """Add the history row of one step."""
        self.last.append(row)
        self.steps += 1
        self.sent += row.get("wire_bytes", 0)

    @property
    def speed(self) -> float | None:
        """Samples/s; None for a rank that counts no samples, such as one slice of a split model."""
        samples = sum(row["samples"] for row in self.last)
        seconds = sum(row["seconds"] for row in self.last)
        return samples / max(seconds, 1e-9) if samples else None

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the time of the latest steps; the shares add up to 1."""
        spent = {name: sum(row.get(key, 0) for row in self.last) for name, key in PARTS.items()}
        total = sum(spent.values())
        return {name: seconds / total if total else 0.0 for name, seconds in spent.items()}


class RunProgress:
    """The progress of all ranks, from their messages.

    Args:
        epochs: Number of epochs of the experiment.
        clock: Function that returns the current time in seconds.

    Attributes:
        ranks: Progress of each rank, by number.
        doing: Current activity of the ranks.
        loss: Last known loss of any rank.
        steps_per_epoch: Number of steps of an epoch; None until it is known.
    """

    def __init__(self, epochs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.epochs, self._clock = epochs, clock
        # Both contain a time and the mean number of steps of a rank at that time.
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)
        self._ended = 0  # epochs that all ranks have completed
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
                # Without a "plan" message, the end of the first epoch reveals the epoch's length.
                self.steps_per_epoch = self.steps_per_epoch or record["step"]
            elif kind == "step":
                self._step(record)
        if self._mean_steps > self._last[1]:
            self._last = self._clock(), self._mean_steps
            # The speed is measured from here, because the first step includes tracing.
            self._first = self._first or self._last

    def _step(self, row: Row) -> None:
        self.ranks.setdefault(int(row["rank"]), RankProgress()).add(row)
        # A worker that is ahead of the other workers may be beyond the last epoch.
        self.epoch = min(max(self.epoch, int(row["epoch"])), self.epochs - 1)
        if not math.isnan(row["loss"]):
            self.loss = row["loss"]

    @property
    def steps(self) -> int:
        """Number of steps that every rank has completed: the number of the slowest rank."""
        return min((rank.steps for rank in self.ranks.values()), default=0)

    @property
    def _mean_steps(self) -> float:
        """Mean number of steps of a rank, because asynchronous ranks share one total of steps."""
        return sum(rank.steps for rank in self.ranks.values()) / max(1, len(self.ranks))

    @property
    def share(self) -> float | None:
        """Completed share of the training, 0 to 1; None while the length of an epoch is unknown."""
        if not self.steps_per_epoch:
            return None
        # Late gradients are dropped, so ranks may end an epoch with fewer steps than planned.
        completed = max(self._mean_steps, self._ended * self.steps_per_epoch)
        return min(1.0, completed / (self.steps_per_epoch * self.epochs))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds for the remaining steps, at the speed since the first observed steps.

        The first steps do not count, because they include tracing and compilation.
        """
        if self._first is None or self.share is None:
            return None
        seconds, steps = (now - then for now, then in zip(self._last, self._first, strict=True))
        remaining = (1 - self.share) * (self.steps_per_epoch or 0) * self.epochs
        return remaining * seconds / steps if steps else None


class ProgressView(Protocol):
    """The interface of a running experiment for displays, which RunHandle implements."""

    rows: list[Row]
    epochs: list[Row]
    progress: RunProgress

    @property
    def outline(self) -> Outline:
        """Label, workers and epochs of the experiment."""

    @property
    def run(self) -> Run | None:
        """The run's record after its end; None before."""

    def stop(self) -> None:
        """End training after the same step on all ranks."""


class Display(Protocol):
    """A display of a running experiment."""

    def draw(self, live: ProgressView) -> None:
        """Show the current state."""

    def close(self, live: ProgressView) -> None:
        """Show the end of the run; no further call follows."""
