"""Test what overlap hides and could hide, on timelines small enough to add up by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from labkit.exchange import timeline_rows
from labkit.records.timed_steps import Overlap, overlaps

# Buckets 0 and 1 are ready at 1 s and 4 s and take 2 s each; training waits from 4 s on.
BUSY_LINE = Overlap(0, [1.0, 4.0], [2.0, 2.0], [(0, 4.0, 4.0), (1, 4.0, 6.0)])
LATE_LINE = Overlap(0, [1.0, 4.0], [2.0, 2.0], [(0, 4.0, 5.5), (1, 5.5, 7.5)])


def test_what_is_hidden_is_what_nobody_waited_for() -> None:
    assert (BUSY_LINE.communication, BUSY_LINE.exposed, BUSY_LINE.ideal) == (4.0, 2.0, 2.0)


def test_an_idle_line_is_held_against_one_without_delay() -> None:
    assert (LATE_LINE.exposed, LATE_LINE.ideal) == (3.5, 2.0)


def test_work_between_waits_hides_what_comes_after() -> None:
    """Test that applying one bucket for 1 s hides the communication of the next bucket."""
    between = Overlap(0, [0.0, 0.0], [1.0, 1.0], [(0, 0.0, 1.0), (1, 2.0, 2.0)])
    assert (between.exposed, between.ideal) == (1.0, 1.0)


def test_the_best_order_may_be_the_most_urgent_first() -> None:
    """Test two ready buckets: bucket 0 is sent first although training waits for bucket 1 first."""
    urgent = Overlap(0, [0.0, 0.0], [3.0, 1.0], [(1, 0.0, 4.0), (0, 7.0, 7.0)])
    assert (urgent.exposed, urgent.ideal) == (4.0, 1.0)


def events(step: float, late: float) -> list[tuple[str, int, int, float, float]]:
    """Return events of a step with one bucket, which this rank packs `late` seconds later."""
    ready = step + 1 + late
    return [
        ("pack", 0, 0, ready - 0.5, ready),
        ("communicate", 0, 0, ready, step + 4),
        ("wait", 0, 0, ready, step + 4),
        ("step", 0, -1, step, step + 5),
    ]


def test_a_bucket_is_ready_when_the_last_rank_has_packed_it() -> None:
    first = [*events(0.0, 0.0), *events(10.0, 0.0)]
    second = [*events(0.0, 1.0), *events(10.0, 2.0)]
    found = overlaps(pd.DataFrame(timeline_rows([first, second])))
    assert [one.ready for one in found] == [[2.0], [13.0]]
    assert [one.seconds for one in found] == [[2.0], [1.0]]
    assert [one.waits for one in found] == [[(0, 2.0, 4.0)], [(0, 13.0, 14.0)]]


def test_an_exchange_that_is_not_whole_is_left_out() -> None:
    first = [*events(0.0, 0.0), *events(10.0, 0.0)]
    found = overlaps(pd.DataFrame(timeline_rows([first[2:], first])))
    assert [one.ready for one in found] == [[pytest.approx(11.0)]]
