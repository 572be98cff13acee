"""Test tables of delayed gradients against their drawing, and for deadlocks."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline import delayed
from labkit.simulate.pipeline import simulate_pipeline


def test_the_drawing() -> None:
    assert str(delayed(3, 4)).splitlines() == [
        "F0 ·  F1 ·  F2 B0 F3 B1",
        "·  F0 ·  F1 B0 F2 B1 F3 B2",
        "·  ·  F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("modules", [1, 2, 4])
def test_the_bound_is_reached_where_a_backward_takes_two_forwards(modules: int) -> None:
    """Test Huo 2018: a step takes K forwards and one backward, a speed-up of 3/(1 + 2/K)."""
    forward = 1.0 / modules
    few, many = (
        simulate_pipeline(delayed(modules, t), forward, 2 * forward).seconds for t in (20, 40)
    )
    step = (many - few) / 20
    assert 3 / step >= 3 / (1 + 2 / modules) - 1e-9
    assert step >= 3 / modules - 1e-9  # at least the computation of one module


def test_nothing_is_lost_on_the_way() -> None:
    table = delayed(3, 5)
    sent = int(np.sum(table.action == "send"))
    assert sent == int(np.sum(table.action == "receive")) > 0


def test_fewer_than_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match="give one or more of each"):
        delayed(2, 0)
