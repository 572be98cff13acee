"""Test nested timeouts: for any limit, an inner timeout ends before an outer one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from labkit.common.timeouts import Limits

LIMITS = [0.1, 0.4, 1.0, 2.0, 6.0, 10.0, 16.0, 30.0, 60.0, 120.0, 600.0, 86_400.0]


@pytest.mark.parametrize("limit", LIMITS)
def test_an_inner_deadline_fires_before_an_outer_one(limit: float) -> None:
    moments = Limits.of(limit)
    for (inner, early), (outer, late) in pairwise(moments._asdict().items()):
        assert 0 < early < late, f"{inner} before {outer}"
    assert moments.wait == limit
    # The requested report of all ranks arrives before the error is raised.
    assert moments.wait - moments.look == pytest.approx(min(3.0, limit / 4))


def test_those_of_the_default_are_the_ones_that_load_has_been_tried_with() -> None:
    assert Limits.of(600.0) == (2.0, 8.0, 10.0, 597.0, 600.0, 630.0, 660.0)
