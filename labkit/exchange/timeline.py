"""The timeline of one rank: timed events of its training steps and buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from labkit.communicator import Clock

KINDS = ("step", "pack", "communicate", "wait")
MAX_EVENTS = 200_000  # maximum number of stored events; older events of a long run are dropped

Event = tuple[str, int, int, float, float]  # kind, training step, bucket, start time, stop time


class Timeline:
    """The events of this rank: (kind, step, bucket, start, stop), in seconds of the host's clock.

    An event with the kind `step` covers a whole training step. During an event with the kind
    `pack`, the rank copies gradients into a bucket. During an event with the kind `communicate`,
    the communication thread exchanges a bucket. During an event with the kind `wait`, the training
    step blocks until a bucket is complete. Outside `pack` and `wait` events, a training step
    computes. The times of ranks on the same host are comparable, because they use one clock.
    Recording an event takes much less than a microsecond.

    Attributes:
        events: The latest events, at most `MAX_EVENTS`.
        step: The number of the current training step.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.step = 0

    def add(self, kind: str, bucket: int, start: float) -> None:
        """Append an event that ends now to the events of the current step."""
        self.events.append((kind, self.step, bucket, start, self.clock.now()))

    def of_step(self, step: int) -> list[Event]:
        """Return the events of one training step."""
        return [event for event in self.events if event[1] == step]


def timeline_rows(timelines: Iterable[Iterable[Event]]) -> list[dict[str, Any]]:
    """Return the events of all ranks as rows with rank, kind, step, bucket, start and stop.

    Times are in seconds since the start of the first event.
    """
    events = [(rank, *event) for rank, timeline in enumerate(timelines) for event in timeline]
    begin = min((event[4] for event in events), default=0.0)
    names = ("rank", "kind", "step", "bucket", "start", "stop")
    return [
        dict(zip(names, (*event[:4], event[4] - begin, event[5] - begin), strict=True))
        for event in events
    ]
