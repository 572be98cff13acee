"""The communication time that computation hides, and could hide, from the ranks' timelines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.exchange.bucket_order import by_priority
from labkit.records.run import Run
from labkit.records.timed_steps import steady_steps, step_seconds, timeline_of

if TYPE_CHECKING:
    import pandas

MIN_HIDDEN_FRACTION = (
    0.01  # fraction of the communication time; if less can be hidden, no ratio is reported
)
NO_SPEED: dict[str, float] = {"steps": 0, "buckets": 0} | dict.fromkeys(
    ("step_ms", "communication_ms", "exposed_ms", "hidden_ms", "ideal_ms", "reached"), math.nan
)


@dataclass(frozen=True)
class Overlap:
    """One step's exchange of all gradient buckets, combined over the ranks.

    Ranks of one host share a clock. A bucket is ready when the last rank has packed the bucket.
    The bucket's exchange starts when the last rank joins, so waiting for a slower rank does not
    count as communication.
    """

    step: int
    ready: list[float]  # seconds on the host's clock, by bucket
    seconds: list[float]  # duration of communication, by bucket
    waits: list[tuple[int, float, float]]  # bucket, start, stop on the rank that waits least

    @property
    def communication(self) -> float:
        """Total seconds of communication, summed over buckets."""
        return sum(self.seconds)

    @property
    def exposed(self) -> float:
        """Total seconds for which training waits for communication; concurrent waits count once."""
        # The time before `waited_until` is already counted.
        exposed, waited_until = 0.0, self.waits[0][1]
        for _, start, stop in self.waits:
            exposed += max(0.0, stop - max(start, waited_until))
            waited_until = max(waited_until, stop)
        return exposed

    @property
    def ideal(self) -> float:
        """Seconds of waiting that would remain with the best order of buckets, without delays.

        In this ideal, the communication channel is never idle while a bucket is ready. The channel
        serves buckets first come, first served, or by urgency, whichever leaves less waiting.
        Computation between the waits takes as long as measured.
        """
        urgency = [0] * len(self.ready)
        for position, (bucket, _, _) in enumerate(self.waits):
            # A bucket is more urgent if training waits for it earlier.
            urgency[bucket] = position
        # Neither order is optimal in all cases, so both are tried.
        by_ready_time = sorted(range(len(self.ready)), key=lambda bucket: self.ready[bucket])
        orders = (by_ready_time, by_priority(self.ready, self.seconds, urgency))
        return min(self._exposed(self._finish(order)) for order in orders)

    def _finish(self, order: Iterable[int]) -> list[float]:
        finish, free = [0.0] * len(self.ready), float("-inf")
        for bucket in order:
            # A bucket's exchange starts when the bucket is ready and the channel is free.
            free = max(self.ready[bucket], free) + self.seconds[bucket]
            finish[bucket] = free
        return finish

    def _exposed(self, finish: list[float]) -> float:
        now, waited_until, exposed = self.waits[0][1], self.waits[0][1], 0.0
        for bucket, start, stop in self.waits:
            now += max(0.0, start - waited_until)  # computation since the previous wait
            exposed += max(0.0, finish[bucket] - now)
            now, waited_until = max(now, finish[bucket]), max(waited_until, stop)
        return exposed


def hidden_parts(run: Run) -> dict[str, float]:
    """Return how much of a run's communication time is hidden, as medians over steady steps.

    `labkit.figures.overlap` shows these values as a table row, or `NO_SPEED` if verification
    failed.

    Raises:
        LabkitError: The run has no timeline of gradient exchanges.
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
    # A ratio to a tiny hideable time would be noise.
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
    """Return the complete gradient exchanges of a timeline, oldest first.

    Exchanges are counted from the end, because a long run keeps only its last events. Step numbers
    do not serve, because an event of the communication thread has the step in which it ended, which
    may be the next step.

    Args:
        timeline: Events of all ranks, with rank, kind, step, bucket, start, stop (seconds).
    """
    events = timeline[timeline["kind"] != "step"].sort_values("start", kind="stable")
    # On every rank, the n-th last event of a bucket belongs to the n-th last exchange.
    back = events.groupby(["rank", "kind", "bucket"]).cumcount(ascending=False)
    buckets = sorted(events["bucket"].unique())
    # Each rank has three events per bucket, for packing, communication and waiting.
    whole = 3 * len(buckets) * events["rank"].nunique()
    exchanges = [_overlap(part) for _, part in events.groupby(back) if len(part) == whole]
    return exchanges[::-1]


def _overlap(part: pandas.DataFrame) -> Overlap:
    packs, serves = part[part["kind"] == "pack"], part[part["kind"] == "communicate"]
    by_bucket = serves.groupby("bucket")
    waits = part[part["kind"] == "wait"]
    waited = (waits["stop"] - waits["start"]).groupby(waits["rank"]).sum()
    # The rank that waits least is the slowest one, for which the other ranks wait.
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
