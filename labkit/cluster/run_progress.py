"""Progress of a running experiment, computed from its history rows: steps, speed, time left.

This module also defines the protocols that displays use, so that displays need not import
RunHandle.
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

WINDOW = 50  # number of latest steps over which speed and time shares are computed
# PARTS maps each component of a step's time to its column in a history row.
PARTS = {
    "compute": "compute_seconds",
    "codec": "codec_seconds",
    "communicate": "communicate_seconds",
    "wait": "wait_seconds",
}

Row = dict[str, float]  # a history row of a step, or the metrics after an epoch


@dataclass(frozen=True)
class Outline:
    """The facts about an experiment that displays show; the run's record also contains them."""

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
        """Share of each component in the time of the latest steps; all shares add up to 1."""
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
        steps_per_epoch: Number of steps of an epoch; None until it is known.
    """

    def __init__(self, epochs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.epochs, self._clock = epochs, clock
        # `_first` and `_last` each contain a time and the mean number of steps per rank at that
        # time.
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)
        self._ended = 0  # number of epochs that all ranks have completed
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
            # The speed is measured from the first completed step on, because the first step
            # includes tracing.
            self._first = self._first or self._last

    def _step(self, row: Row) -> None:
        self.ranks.setdefault(int(row["rank"]), RankProgress()).add(row)
        # A worker that is ahead of the other workers may be beyond the last epoch.
        self.epoch = min(max(self.epoch, int(row["epoch"])), self.epochs - 1)
        if not math.isnan(row["loss"]):
            self.loss = row["loss"]

    @property
    def steps(self) -> int:
        """Number of steps that every rank has completed, i.e. the steps of the slowest rank."""
        return min((rank.steps for rank in self.ranks.values()), default=0)

    @property
    def _mean_steps(self) -> float:
        """Mean number of completed steps per rank; asynchronous ranks differ in their numbers."""
        return sum(rank.steps for rank in self.ranks.values()) / max(1, len(self.ranks))

    @property
    def share(self) -> float | None:
        """Completed share of training, from 0 to 1; None until the length of an epoch is known."""
        if not self.steps_per_epoch:
            return None
        # Late gradients are dropped, so ranks may have done fewer steps than planned at the end of
        # an epoch.
        completed = max(self._mean_steps, self._ended * self.steps_per_epoch)
        return min(1.0, completed / (self.steps_per_epoch * self.epochs))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds for the remaining steps, from the speed after the first observed steps.

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
        """Show how the run has ended; this is the last call of the display."""
