"""A rank's timeline."""

from __future__ import annotations

from labkit.communicator import WALL
from labkit.exchange import Timeline


def test_a_timeline_forgets_the_oldest_events_first() -> None:
    timeline = Timeline(WALL)
    keep = timeline.events.maxlen
    assert keep is not None
    for step in range(keep + 10):
        timeline.step = step
        timeline.add("pack", 0, 0.0)
    assert len(timeline.events) == keep
    assert timeline.of_step(9) == []
    assert len(timeline.of_step(10)) == 1
