"""The timeline of one rank: timed events of its training steps and buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from labkit.communicator import Clock

KINDS = ("step", "pack", "communicate", "wait")
MAX_EVENTS = 200_000  # the maximum number of stored events, the last ones of a long run

Event = tuple[str, int, int, float, float]  # kind, step, bucket, start, stop


class Timeline:
    """The events of this rank: (kind, step, bucket, start, stop), in seconds of the host's clock.

    An event of kind `step` covers a whole training step. During an event `pack`, the rank copies
    gradients into a bucket. During `communicate`, the communication thread exchanges a bucket.
    During `wait`, the training step blocks until a bucket is complete. The rest of a step is
    computation. Times of ranks on one host are comparable. To record an event takes well under a
    microsecond.

    Attributes:
        events: The latest events, at most `MAX_EVENTS`.
        step: The number of the current training step.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.step = 0

    def add(self, kind: str, bucket: int, start: float) -> None:
        """Append an event of the current step that ends now."""
        self.events.append((kind, self.step, bucket, start, self.clock.now()))

    def of_step(self, step: int) -> list[Event]:
        """Return the events of one training step."""
        return [event for event in self.events if event[1] == step]


def timeline_rows(timelines: Iterable[Iterable[Event]]) -> list[dict[str, Any]]:
    """Return the events of all ranks as rows of rank, kind, step, bucket, start, stop.

    Times are in seconds since the start of the first event.
    """
    events = [(rank, *event) for rank, timeline in enumerate(timelines) for event in timeline]
    begin = min((event[4] for event in events), default=0.0)
    names = ("rank", "kind", "step", "bucket", "start", "stop")
    return [
        dict(zip(names, (*event[:4], event[4] - begin, event[5] - begin), strict=True))
        for event in events
    ]
