"""The timeline of one rank: what it did when, bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from labkit.communicator import Clock

KINDS = ("step", "pack", "communicate", "wait")
KEEP = 200_000  # events; the last ones of a long run

Event = tuple[str, int, int, float, float]  # kind, step, bucket, start, stop


class Timeline:
    """Events of this rank: (kind, step, bucket, start, stop), seconds of the rank's clock.

    `step`: from the begin of a training step to its end; `pack`: gradients are copied into a
    bucket; `communicate`: the communication thread serves a bucket; `wait`: the training step
    stands still until a bucket is there. What of a step is neither pack nor wait is computation.
    The clock is that of the host: ranks of one host compare. To append one event costs well
    under a microsecond.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events: deque[Event] = deque(maxlen=KEEP)
        self.step = 0

    def add(self, kind: str, bucket: int, start: float) -> None:
        """An event that ends now."""
        self.events.append((kind, self.step, bucket, start, self.clock.now()))

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
