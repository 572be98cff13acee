"""Test the order of buckets: the frontmost ready layer is sent first, without needless pauses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.exchange.autotune import by_priority

JOBS = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0.01, 5), st.integers(0, 5)), min_size=1, max_size=9
)


@pytest.mark.parametrize(
    ("ready", "seconds", "order"),
    [
        ([2, 1, 0], [1, 3, 1], [2, 1, 0]),  # when bucket 1 ends at 4, only bucket 0 is left
        ([2, 1, 0], [1, 1, 3], [2, 0, 1]),  # when bucket 2 ends at 3, the urgent bucket 0 is ready
        ([0, 0, 0], [1, 1, 1], [0, 1, 2]),
        ([5, 0, 9], [1, 1, 1], [1, 0, 2]),  # idle until 5: nothing else is ready
    ],
)
def test_the_most_urgent_bucket_that_is_ready_goes_first(
    ready: list[float], seconds: list[float], order: list[int]
) -> None:
    assert by_priority(ready, seconds, [0, 1, 2]) == order


@given(JOBS)
def test_every_bucket_is_served_once(jobs: list[tuple[float, float, int]]) -> None:
    ready, seconds, urgency = zip(*jobs, strict=True)
    assert sorted(by_priority(ready, seconds, urgency)) == list(range(len(jobs)))


@given(JOBS)
def test_nothing_more_urgent_is_left_waiting(jobs: list[tuple[float, float, int]]) -> None:
    ready, seconds, urgency = zip(*jobs, strict=True)
    order, now = by_priority(ready, seconds, urgency), 0.0
    for place, bucket in enumerate(order):
        left = order[place:]
        now = max(now, min(ready[each] for each in left))
        assert ready[bucket] <= now  # the line is idle only while nothing is ready
        waiting = [each for each in left if ready[each] <= now]
        assert urgency[bucket] == min(urgency[each] for each in waiting)
        now += seconds[bucket]
