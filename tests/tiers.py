"""Divide the cases of a battery among three tiers: default, slow and exhaustive.

`@pytest.mark.battery(always, slow)` is the mark of a parametrized test. Its first `always` cases
run by default, the next `slow` ones in the slow tier, and the others in the exhaustive tier. The
cases are taken in an order in which each beginning is spread evenly over all cases.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly over the unit interval


def spread(count: int) -> list[int]:
    """Return the numbers 0 to `count - 1` in an order of which each beginning is spread evenly."""
    places = sorted(range(count), key=lambda number: number * GOLDEN % 1)
    return sorted(range(count), key=places.__getitem__)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of each battery, before pytest deselects cases by their marks."""
    batteries: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("battery"):
            batteries[item.nodeid.partition("[")[0]].append(item)
    for cases in batteries.values():
        mark = cases[0].get_closest_marker("battery")
        always, slow = mark.args if mark else (0, 0)
        for place, number in enumerate(spread(len(cases))):
            if place >= always:
                cases[number].add_marker("slow" if place < always + slow else "exhaustive")
