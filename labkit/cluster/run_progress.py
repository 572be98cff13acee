"""What the rows of a running experiment amount to: how far, how fast, how much, how long yet.

Also what a display may ask of a running experiment: displays know this, not the one who runs it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from labkit.records.run import Run
from labkit.records.stream import Told

WINDOW = 50  # steps over which speed and shares are taken
# Parts of a step, as columns of a row.
PARTS = {
    "compute": "compute_seconds",
    "codec": "codec_seconds",
    "communicate": "communicate_seconds",
    "wait": "wait_seconds",
}

Row = dict[str, float]  # of the history, or the metrics after an epoch


@dataclass(frozen=True)
class Outline:
    """What is known of an experiment from its record."""

    label: str
    workers: int
    epochs: int
    clock: str = "wall"


@dataclass
class Rank:
    """What one rank has told.

    Attributes:
        last: its latest rows.
        steps: how many it took.
        sent: bytes over links.
    """

    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: int = 0
    sent: float = 0.0

    def add(self, row: Row) -> None:
        """Take in a row."""
        self.last.append(row)
        self.steps += 1
        self.sent += row.get("wire_bytes", 0)

    @property
    def speed(self) -> float | None:
        """Samples/s; None of a rank that does not count them, as those of a model in parts."""
        samples = sum(row["samples"] for row in self.last)
        seconds = sum(row["seconds"] for row in self.last)
        return samples / max(seconds, 1e-9) if samples else None

    @property
    def shares(self) -> dict[str, float]:
        """Which part of its time went where; they add up to 1."""
        spent = {name: sum(row.get(key, 0) for row in self.last) for name, key in PARTS.items()}
        total = sum(spent.values())
        return {name: seconds / total if total else 0.0 for name, seconds in spent.items()}


class Tally:
    """Sums over what ranks tell.

    Args:
        epochs: of the experiment.
        clock: seconds, of the one who looks.

    Attributes:
        ranks: what each has told, by number.
        doing: what they are at.
        loss: the last that a rank knew.
        steps_per_epoch: None until it is known.
    """

    def __init__(self, epochs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.epochs, self._clock = epochs, clock
        # When the first steps were seen, and how many they were in the mean; and the last ones.
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)
        self._ended = 0  # epochs that all have behind them
        self.ranks: dict[int, Rank] = {}
        self.doing = "starting"
        self.loss = math.nan
        self.epoch = 0
        self.steps_per_epoch: int | None = None

    def add(self, told: Iterable[Told]) -> None:
        """Take in what has come, see `labkit.records.stream`."""
        for kind, record in told:
            if kind == "doing":
                self.doing = record["what"]
            elif kind == "plan":
                self.steps_per_epoch = record["steps"]
            elif kind == "epoch":
                self._ended = record["epoch"] + 1
                # Where nobody could plan, the end of the first epoch tells its length.
                self.steps_per_epoch = self.steps_per_epoch or record["step"]
            elif kind == "step":
                self._step(record)
        if self._taken > self._last[1]:
            self._last = self._clock(), self._taken
            # The pace counts from here: what came before held the tracing of the first step.
            self._first = self._first or self._last

    def _step(self, row: Row) -> None:
        self.ranks.setdefault(int(row["rank"]), Rank()).add(row)
        # A worker that is ahead of the others goes on in what would be an epoch more.
        self.epoch = min(max(self.epoch, int(row["epoch"])), self.epochs - 1)
        if not math.isnan(row["loss"]):
            self.loss = row["loss"]

    @property
    def steps(self) -> int:
        """Steps that all ranks which have told anything have taken."""
        # The slowest: a step is taken when all have taken it.
        return min((rank.steps for rank in self.ranks.values()), default=0)

    @property
    def _taken(self) -> float:
        """Steps that a rank has taken in the mean: asynchronous ones share out what there is."""
        return sum(rank.steps for rank in self.ranks.values()) / max(1, len(self.ranks))

    @property
    def share(self) -> float | None:
        """How much of the training is done, 0 to 1; None while nobody knows its length."""
        if not self.steps_per_epoch:
            return None
        # Gradients that come too late are dropped: then an epoch ends with fewer steps in the mean.
        done = max(self._taken, self._ended * self.steps_per_epoch)
        return min(1.0, done / (self.steps_per_epoch * self.epochs))

    @property
    def seconds_left(self) -> float | None:
        """For the epochs that are left, at the pace since the first steps were seen.

        Those stand apart: the first one traces and compiles.
        """
        if self._first is None or self.share is None:
            return None
        seconds, steps = (now - then for now, then in zip(self._last, self._first, strict=True))
        left = (1 - self.share) * (self.steps_per_epoch or 0) * self.epochs
        return left * seconds / steps if steps else None


class ProgressView(Protocol):
    """A running experiment as displays see it; see `labkit.cluster.Live`, which is one."""

    rows: list[Row]
    epochs: list[Row]
    tally: Tally

    @property
    def outline(self) -> Outline:
        """Its label, workers and epochs."""

    @property
    def run(self) -> Run | None:
        """The record, once it is written."""

    def stop(self) -> None:
        """End training after the same step on all ranks."""


class Display(Protocol):
    """Shows a running experiment."""

    def draw(self, live: ProgressView) -> None:
        """Show how it stands."""

    def close(self, live: ProgressView) -> None:
        """Show how it ended; nothing more will come."""
