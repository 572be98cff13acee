"""Test that ranks whose clocks differ report timelines on one common clock."""

from __future__ import annotations

import pytest

import labkit
from labkit.communicator import Communicator
from labkit.communicator.clock import Offset, WallClock, offset
from labkit.records.run_metrics import on_one_clock

EVENTS = [("step", 0, -1, 105.0, 106.0), ("step", 1, -1, 110.0, 115.0)]


def test_events_move_by_what_was_measured_and_drift_is_even_between() -> None:
    offsets = [Offset(105.0, 100.0, 1e-4), Offset(115.0, 101.0, 1e-4)]
    found = on_one_clock(EVENTS, offsets)
    assert [event[:3] for event in found] == [event[:3] for event in EVENTS]
    assert [event[3] for event in found] == pytest.approx([5.0, 9.5])
    assert found[1][4] == pytest.approx(14.0)


def test_clocks_that_cannot_be_told_apart_are_one() -> None:
    offsets = [Offset(105.0, 3e-5, 5e-5), Offset(115.0, -2e-5, 5e-5)]
    assert on_one_clock(EVENTS, offsets) == EVENTS
    assert on_one_clock(EVENTS, []) == EVENTS


def measured(communicator: Communicator) -> Offset:
    class Ahead(WallClock):
        """A clock of another host: rank 2's clock is 2,000 s ahead."""

        @staticmethod
        def now() -> float:
            return WallClock.now() + 1000.0 * communicator.rank

    return offset(Ahead(), communicator.allgather)


def test_the_offset_of_a_rank_lies_within_what_is_said(cluster: labkit.Cluster) -> None:
    found = cluster.call(measured)
    for rank, each in enumerate(found):
        assert each.within > 0
        assert abs(each.seconds - 1000.0 * rank) <= each.within + 1e-9
        assert each.within < 100  # the bound is too small to confuse two ranks
