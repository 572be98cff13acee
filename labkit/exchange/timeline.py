"""The timeline of one rank: what it did when, bucket by bucket."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

KINDS = ("step", "pack", "communicate", "wait")
KEEP = 200_000  # events; the last ones of a long run

Event = tuple[str, int, int, float, float]  # kind, step, bucket, start, stop


class Timeline:
    """Events of this rank: (kind, step, bucket, start, stop), seconds of the monotonic clock.

    `step`: from the begin of a training step to its end; `pack`: gradients are copied into a
    bucket; `communicate`: the communication thread serves a bucket; `wait`: the training step
    stands still until a bucket is there. What of a step is neither pack nor wait is computation.
    The clock is that of the host: ranks of one host compare. To append one event costs well
    under a microsecond.
    """

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=KEEP)
        self.step = 0

    def add(self, kind: str, bucket: int, start: float) -> None:
        """An event that ends now."""
        self.events.append((kind, self.step, bucket, start, time.monotonic()))

    def of_step(self, step: int) -> list[Event]:
        """The events of one step."""
        return [event for event in self.events if event[1] == step]


def timeline_rows(timelines: Iterable[Iterable[Event]]) -> list[dict[str, Any]]:
    """Events of all ranks as rows: rank, kind, step, bucket, start, stop (s), from the first on."""
    events = [(rank, *event) for rank, own in enumerate(timelines) for event in own]
    begin = min((event[4] for event in events), default=0.0)
    names = ("rank", "kind", "step", "bucket", "start", "stop")
    return [
        dict(zip(names, (*event[:4], event[4] - begin, event[5] - begin), strict=True))
        for event in events
    ]


def chrome_trace(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Rows of a run's timeline in the Trace Event Format, which chrome://tracing and Perfetto open.

    Args:
        rows: with rank, kind, step, bucket, start, stop (seconds).
    """
    lanes = {"step": 0, "pack": 1, "wait": 1, "communicate": 2}
    names = {0: "step", 1: "training", 2: "communication"}
    events: list[dict[str, Any]] = []
    ranks = set()
    for row in rows:
        ranks.add(int(row["rank"]))
        # What a stage computes or sends stands in the lane of training, as "forward 0".
        lane = lanes.get(row["kind"], lanes["step"] + 1)
        bucket = "" if row["bucket"] < 0 else f" {row['bucket']:.0f}"
        events.append(
            {
                "name": f"{row['kind']}{bucket}",
                "cat": row["kind"],
                "ph": "X",
                "pid": int(row["rank"]),
                "tid": lane,
                "ts": 1e6 * row["start"],
                "dur": 1e6 * (row["stop"] - row["start"]),
                "args": {"step": int(row["step"])},
            }
        )
    for rank in sorted(ranks):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        events += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
            for tid, name in names.items()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
