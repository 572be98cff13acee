"""Test from which number of threads more threads are slower, and when this stays unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from labkit.records.step_costs import StepTime, ThreadSweep, more_is_less, thread_costs

# ms per step by intra-op and inter-op threads, in two repeats; the machine is slower in the second.
STEPS = {
    (1, 1): (10.0, 20.0),
    (2, 1): (6.0, 12.0),
    (4, 1): (7.0, 15.0),
    (8, 1): (9.0, 18.0),
    (2, 2): (6.5, 11.9),  # slower in one repeat, faster in the other
}


def sweep(steps: Mapping[tuple[int, int], Sequence[float]]) -> ThreadSweep:
    timed = [
        StepTime(32, *pair, repeat, ms)
        for pair, step in steps.items()
        for repeat, ms in enumerate(step)
    ]
    return ThreadSweep(timed, cores=2)


def test_more_is_less_from_the_first_number_that_is_slower_in_every_repeat() -> None:
    intra, inter = more_is_less(sweep(STEPS)).to_dict("records")
    assert (intra["threads"], intra["best"], intra["other"], intra["less_from"]) == (
        "intra",
        2,
        1,
        4,
    )
    # Ratios are taken within a repeat, so the slow machine of the second repeat cancels out.
    assert (intra["ratio_low"], intra["ratio_high"]) == (7 / 6, 15 / 12)
    assert (inter["threads"], inter["best"], inter["most"]) == ("inter", 1, 2)
    assert math.isnan(inter["less_from"])


def test_no_number_is_named_where_a_larger_one_is_no_slower_or_nothing_was_repeated() -> None:
    steps = {(1, 1): (6.0, 6.0), (2, 1): (8.0, 9.0), (8, 1): (6.5, 5.9)}
    once = {pair: each[:1] for pair, each in STEPS.items()}
    for each in (steps, once):
        intra, _ = more_is_less(sweep(each)).to_dict("records")
        assert math.isnan(intra["less_from"])


def test_the_most_threads_may_be_the_best() -> None:
    intra, _ = more_is_less(sweep({(1, 1): (10.0, 9.0), (2, 1): (6.0, 6.0)})).to_dict("records")
    assert intra["best"] == intra["most"] == 2
    assert math.isnan(intra["less_from"])


def test_costs_are_medians_with_their_least_and_most() -> None:
    costs = thread_costs(sweep(STEPS)).set_index(["intra", "inter"])
    assert tuple(costs.loc[(4, 1), ["step_ms", "step_ms_low", "step_ms_high"]]) == (11.0, 7.0, 15.0)
