"""Test how the cases of a battery are divided among the tiers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tiers import spread


@given(st.integers(1, 300), st.data())
def test_each_beginning_is_spread_over_all_cases(count: int, data: st.DataObject) -> None:
    order = spread(count)
    assert sorted(order) == list(range(count))
    assert order[0] == 0
    taken = sorted(order[: data.draw(st.integers(1, count))])
    gaps = [after - before for before, after in zip(taken, [*taken[1:], count], strict=True)]
    assert max(gaps) <= 1 + 3 * count / len(taken)
