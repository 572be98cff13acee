"""A rank's timeline."""

from __future__ import annotations

from labkit.communicator import WALL
from labkit.exchange import Timeline, timeline_rows


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


def test_rows_of_all_ranks_count_from_the_first_event_on() -> None:
    first, second = [("pack", 3, 0, 5.0, 6.0)], [("wait", 4, 1, 4.5, 7.0)]
    assert timeline_rows([first, second]) == [
        {"rank": 0, "kind": "pack", "step": 3, "bucket": 0, "start": 0.5, "stop": 1.5},
        {"rank": 1, "kind": "wait", "step": 4, "bucket": 1, "start": 0.0, "stop": 2.5},
    ]
