"""The communication time that computation hides or could hide, from timelines of the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.exchange.autotune import by_priority
from labkit.records.run import Run
from labkit.records.timed_steps import steady_steps, step_seconds, timeline_of

if TYPE_CHECKING:
    import pandas

MIN_HIDDEN_FRACTION = 0.01  # a smaller hideable fraction of communication is only noise
NO_SPEED: dict[str, float] = {"steps": 0, "buckets": 0} | dict.fromkeys(
    ("step_ms", "communication_ms", "exposed_ms", "hidden_ms", "ideal_ms", "reached"), math.nan
)


@dataclass(frozen=True)
class Overlap:
    """The exchange of all gradient buckets in one step, with the combined times of all ranks.

    All ranks of one host use the same clock. A bucket is ready when the last rank has packed it.
    The exchange of a bucket starts when the last rank joins it, so waiting for slower ranks does
    not count as communication.
    """

    step: int
    ready: list[float]  # for each bucket: time in s, on the host's clock, when it is ready
    seconds: list[float]  # for each bucket: duration of its communication in s
    # (bucket, start, stop) of each wait on the rank that waits least.
    waits: list[tuple[int, float, float]]

    @property
    def communication(self) -> float:
        """Total communication time in seconds, summed over the buckets."""
        return sum(self.seconds)

    @property
    def exposed(self) -> float:
        """Seconds for which training waits for communication; waits that overlap count once."""
        # Time before `waited_until` has already been counted.
        exposed, waited_until = 0.0, self.waits[0][1]
        for _, start, stop in self.waits:
            exposed += max(0.0, stop - max(start, waited_until))
            waited_until = max(waited_until, stop)
        return exposed

    @property
    def ideal(self) -> float:
        """Seconds of waiting that would remain with the better of two orders of buckets.

        The simulated exchange is never idle while any bucket is ready. The two orders are by ready
        time and by urgency; the order with less waiting is chosen. The computation between two
        waits is assumed to take its measured time.
        """
        urgency = [0] * len(self.ready)
        for position, (bucket, _, _) in enumerate(self.waits):
            # The earlier training waits for a bucket, the more urgent is the bucket.
            urgency[bucket] = position
        # No single order is optimal in all cases, so two orders are compared.
        by_ready_time = sorted(range(len(self.ready)), key=lambda bucket: self.ready[bucket])
        orders = (by_ready_time, by_priority(self.ready, self.seconds, urgency))
        return min(self._exposed(self._finish(order)) for order in orders)

    def _finish(self, order: Iterable[int]) -> list[float]:
        finish, free = [0.0] * len(self.ready), float("-inf")
        for bucket in order:
            # The exchange of a bucket starts as soon as the bucket is ready and no other exchange
            # is running.
            free = max(self.ready[bucket], free) + self.seconds[bucket]
            finish[bucket] = free
        return finish

    def _exposed(self, finish: list[float]) -> float:
        now, waited_until, exposed = self.waits[0][1], self.waits[0][1], 0.0
        for bucket, start, stop in self.waits:
            # Adds the computation time since the previous wait.
            now += max(0.0, start - waited_until)
            exposed += max(0.0, finish[bucket] - now)
            now, waited_until = max(now, finish[bucket]), max(waited_until, stop)
        return exposed


def hidden_parts(run: Run) -> dict[str, float]:
    """Return how much communication time a run hides, as medians over all steps after warm-up.

    `labkit.figures.overlap` shows the returned values as one row of a table. If verification of the
    run failed, the table row is `NO_SPEED` instead.

    Raises:
        LabkitError: If the run has no timeline of gradient exchanges.
    """
    timeline = timeline_of(run)
    exchanges = overlaps(timeline)
    chosen = set(steady_steps(overlap.step for overlap in exchanges))
    chosen_exchanges = [overlap for overlap in exchanges if overlap.step in chosen]
    seconds = step_seconds(timeline)
    parts = [
        (overlap.communication, overlap.exposed, overlap.ideal) for overlap in chosen_exchanges
    ]
    communication, exposed, ideal = 1e3 * np.array(parts).T
    possible = float(np.median(communication - ideal))
    reached = float(np.median(communication - exposed))
    # If very little communication can be hidden, the hidden fraction would be noise and is not
    # reported.
    significant = possible > MIN_HIDDEN_FRACTION * float(np.median(communication))
    return {
        "steps": len(chosen_exchanges),
        "buckets": len(chosen_exchanges[0].ready),
        "step_ms": 1e3 * float(seconds[seconds.index.isin(chosen)].median()),
        "communication_ms": float(np.median(communication)),
        "exposed_ms": float(np.median(exposed)),
        "hidden_ms": reached,
        "ideal_ms": possible,
        "reached": reached / possible if significant else math.nan,
    }


def overlaps(timeline: pandas.DataFrame) -> list[Overlap]:
    """Return all complete gradient exchanges of a timeline, from the oldest to the newest.

    Exchanges are counted from the end, because the timeline of a long run contains only its last
    events. Step numbers cannot be used, because events of the communication thread are numbered by
    the step in which they end. An event of the communication thread may end in the step after the
    one in which it began.

    Args:
        timeline: Events of all ranks, each with rank, kind, step, bucket, start and stop (in
            seconds).
    """
    events = timeline[timeline["kind"] != "step"].sort_values("start", kind="stable")
    # On every rank, the n-th last event of a bucket belongs to the n-th last exchange.
    back = events.groupby(["rank", "kind", "bucket"]).cumcount(ascending=False)
    buckets = sorted(events["bucket"].unique())
    # Each rank has three events per bucket: packing, communication, and waiting.
    whole = 3 * len(buckets) * events["rank"].nunique()
    exchanges = [_overlap(part) for _, part in events.groupby(back) if len(part) == whole]
    return exchanges[::-1]


def _overlap(part: pandas.DataFrame) -> Overlap:
    packs, serves = part[part["kind"] == "pack"], part[part["kind"] == "communicate"]
    by_bucket = serves.groupby("bucket")
    waits = part[part["kind"] == "wait"]
    waited = (waits["stop"] - waits["start"]).groupby(waits["rank"]).sum()
    # The rank that waits least is the slowest rank, for which the other ranks wait.
    critical_waits = waits[waits["rank"] == waited.idxmin()]
    positions = {
        bucket: position for position, bucket in enumerate(sorted(serves["bucket"].unique()))
    }
    return Overlap(
        step=int(packs["step"].max()),
        ready=packs.groupby("bucket")["stop"].max().tolist(),
        seconds=(by_bucket["stop"].max() - by_bucket["start"].max()).tolist(),
        waits=[
            (positions[bucket], start, stop)
            for bucket, start, stop in zip(
                critical_waits["bucket"],
                critical_waits["start"],
                critical_waits["stop"],
                strict=True,
            )
        ],
    )
