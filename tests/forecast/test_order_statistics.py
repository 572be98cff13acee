"""Test the slowest of n ranks against distributions with known order statistics."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.forecast.calibration import Spread
from labkit.forecast.workers import RankGroup, slowest
from labkit.network import ComputeTime, Slowdown

EXACT = Spread(median=2.0, low=2.0, high=2.0)


def test_without_chance_all_are_done_at_once() -> None:
    assert np.ptp(slowest([RankGroup(EXACT, 10_000)])) == 0


def test_of_one_rank_the_quantiles_are_those_that_were_measured() -> None:
    spread = Spread(median=2.0, low=1.5, high=4.0)
    low, middle, high = np.quantile(slowest([RankGroup(spread)]), (0.05, 0.5, 0.95))
    assert middle == pytest.approx(2.0, rel=1e-9)
    assert (low, high) == (pytest.approx(1.5, rel=0.01), pytest.approx(4.0, rel=0.02))


def test_the_last_of_many_is_an_order_statistic() -> None:
    spread = Spread(median=1.0, low=1 / 1.1, high=1.1)
    one, many = (float(np.median(slowest([RankGroup(spread, n)]))) for n in (1, 13))
    # With probability one half, the slowest of 13 ranks is beyond the 95th percentile: 0.95^13 is
    # about 0.5.
    assert many == pytest.approx(1.1, rel=0.01)
    parts = slowest([RankGroup(spread, 6), RankGroup(spread, 7)])
    assert float(np.median(parts)) == pytest.approx(many, rel=0.01)
    assert one == pytest.approx(1.0)


def test_a_law_with_a_tail_holds_up_all() -> None:
    law = Slowdown(compute=2.0, distribution="exponential")
    found = slowest([RankGroup(EXACT, 3), RankGroup(EXACT, 1, (law,))])
    assert np.median(found) == pytest.approx(2 * (1 + np.log(2)), rel=0.02)
    every = ComputeTime(seconds=1.0, distribution="exponential")
    mean = float(np.mean(slowest([RankGroup(EXACT, 20, (every,))])))
    assert mean == pytest.approx(2 * sum(1 / k for k in range(1, 21)), rel=0.05)


def test_what_was_listed_is_drawn_from() -> None:
    found = slowest([RankGroup(EXACT, 1, (ComputeTime(trace=(1.0, 3.0)),))])
    assert (found.min(), found.max()) == (pytest.approx(1.0), pytest.approx(3.0))
