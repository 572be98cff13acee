"""What overlap hid of an exchange, and what it could have hidden, from the ranks' timelines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.exchange.bucket_order import by_priority
from labkit.records.run import Run
from labkit.records.timed_steps import steady, step_seconds, timeline_of

if TYPE_CHECKING:
    import pandas

NOTHING = 0.01  # of the communication: with less to hide, no share of it is told
NO_SPEED: dict[str, float] = {"steps": 0, "buckets": 0} | dict.fromkeys(
    ("step_ms", "communication_ms", "exposed_ms", "hidden_ms", "ideal_ms", "reached"), math.nan
)


@dataclass(frozen=True)
class Overlap:
    """One exchange of all buckets, as the ranks lived through it together.

    Ranks of one host share a clock. A bucket is ready when the last rank has packed it, and its
    exchange begins when the last rank comes to it: that somebody waits for a slower rank is no
    communication.
    """

    step: int
    ready: list[float]  # s, by bucket
    seconds: list[float]  # s, by bucket
    waits: list[tuple[int, float, float]]  # bucket, start, stop; of the rank that waited least

    @property
    def communication(self) -> float:
        """Seconds that the buckets took on the line."""
        return sum(self.seconds)

    @property
    def exposed(self) -> float:
        """Seconds for which training stood in a wait; two waits at a time count once."""
        # `left` is until when waits have been counted.
        exposed, left = 0.0, self.waits[0][1]
        for _, start, stop in self.waits:
            exposed += max(0.0, stop - max(start, left))
            left = max(left, stop)
        return exposed

    @property
    def ideal(self) -> float:
        """The exposed seconds, had the same buckets been served in the best order, without delay.

        A line that is never idle while a bucket is ready, first come first served, or the most
        urgent first, whichever exposes less; the rank computes between its waits what it did.
        """
        urgency = [0] * len(self.ready)
        for place, (bucket, _, _) in enumerate(self.waits):
            # The order in which training waited is the order in which it needs them.
            urgency[bucket] = place
        # Neither order is the best for all ready times, so that both are tried.
        coming = sorted(range(len(self.ready)), key=lambda bucket: self.ready[bucket])
        orders = (coming, by_priority(self.ready, self.seconds, urgency))
        return min(self._exposed(self._finish(order)) for order in orders)

    def _finish(self, order: Iterable[int]) -> list[float]:
        finish, free = [0.0] * len(self.ready), float("-inf")
        for bucket in order:
            # The line begins a bucket when it is ready, and the one before has passed.
            free = max(self.ready[bucket], free) + self.seconds[bucket]
            finish[bucket] = free
        return finish

    def _exposed(self, finish: list[float]) -> float:
        now, left, exposed = self.waits[0][1], self.waits[0][1], 0.0
        for bucket, start, stop in self.waits:
            now += max(0.0, start - left)  # what was computed since the wait before
            exposed += max(0.0, finish[bucket] - now)
            now, left = max(now, finish[bucket]), max(left, stop)
        return exposed


def hidden_parts(run: Run) -> dict[str, float]:
    """What overlap hid of a run's communication, medians over its steady steps.

    As `labkit.figures.hidden` has them in a row, which is `NO_SPEED` where a gate failed.

    Raises: LabkitError, where the run has no timeline.
    """
    timeline = timeline_of(run)
    every = overlaps(timeline)
    chosen = set(steady(each.step for each in every))
    kept = [each for each in every if each.step in chosen]
    seconds = step_seconds(timeline)
    parts = [(each.communication, each.exposed, each.ideal) for each in kept]
    communication, exposed, ideal = 1e3 * np.array(parts).T
    possible = float(np.median(communication - ideal))
    reached = float(np.median(communication - exposed))
    # A share of next to nothing is noise.
    worth = possible > NOTHING * float(np.median(communication))
    return {
        "steps": len(kept),
        "buckets": len(kept[0].ready),
        "step_ms": 1e3 * float(seconds[seconds.index.isin(chosen)].median()),
        "communication_ms": float(np.median(communication)),
        "exposed_ms": float(np.median(exposed)),
        "hidden_ms": reached,
        "ideal_ms": possible,
        "reached": reached / possible if worth else math.nan,
    }


def overlaps(timeline: pandas.DataFrame) -> list[Overlap]:
    """The exchanges of a timeline, oldest first; those that are not whole are left out.

    Counted from the end, for a long run keeps its last events only. (The step that an event of
    the communication thread carries is the one in which it ended, which may be the next.)

    Args:
        timeline: of all ranks, with rank, kind, step, bucket, start, stop (s).
    """
    events = timeline[timeline["kind"] != "step"].sort_values("start", kind="stable")
    # The n-th event of a bucket from the end belongs to the n-th exchange from the end, on every
    # rank.
    back = events.groupby(["rank", "kind", "bucket"]).cumcount(ascending=False)
    buckets = sorted(events["bucket"].unique())
    # Three: each rank packs, communicates and waits once for a bucket.
    whole = 3 * len(buckets) * events["rank"].nunique()
    found = [_overlap(part) for _, part in events.groupby(back) if len(part) == whole]
    return found[::-1]


def _overlap(part: pandas.DataFrame) -> Overlap:
    packs, serves = part[part["kind"] == "pack"], part[part["kind"] == "communicate"]
    by_bucket = serves.groupby("bucket")
    waits = part[part["kind"] == "wait"]
    waited = (waits["stop"] - waits["start"]).groupby(waits["rank"]).sum()
    # The rank that waited least is the slowest: the others' waits are for it, not for the line.
    own = waits[waits["rank"] == waited.idxmin()]
    places = {bucket: place for place, bucket in enumerate(sorted(serves["bucket"].unique()))}
    return Overlap(
        step=int(packs["step"].max()),
        ready=packs.groupby("bucket")["stop"].max().tolist(),
        seconds=(by_bucket["stop"].max() - by_bucket["start"].max()).tolist(),
        waits=[
            (places[bucket], start, stop)
            for bucket, start, stop in zip(own["bucket"], own["start"], own["stop"], strict=True)
        ],
    )
