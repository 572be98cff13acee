"""Divide tests among three tiers: default, slow and exhaustive.

`@pytest.mark.battery(always, slow)` is the mark of a parametrized test. Its first `always` cases
run by default, the next `slow` ones in the slow tier, and the others in the exhaustive tier. The
cases are taken in an order in which each beginning is spread evenly over all cases.

Tests of methods train models, and each takes seconds. Of each of their files, the slow tier runs at
most `MOST` tests, which are spread evenly over the file, and the exhaustive tier the others.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

MOST = 3
METHODS = (
    *("cluster", "communicator", "compression", "exchange", "keras"),
    *("model_parallel", "programs", "strategies", "worker"),
)
GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly over the unit interval


def spread(count: int) -> list[int]:
    """Return the numbers 0 to `count - 1` in an order of which each beginning is spread evenly."""
    places = sorted(range(count), key=lambda number: number * GOLDEN % 1)
    return sorted(range(count), key=places.__getitem__)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the exhaustive tier, before pytest deselects tests by their marks."""
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
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "slow" in marks and not marks & {"alone", "exhaustive"} and _tests_methods(item.path):
            files[item.path].append(item)
    for tests in files.values():
        for number in spread(len(tests))[MOST:]:
            tests[number].add_marker("exhaustive")


def _tests_methods(path: Path) -> bool:
    return any(folder in METHODS for folder in path.relative_to(Path(__file__).parent).parts[:-1])
