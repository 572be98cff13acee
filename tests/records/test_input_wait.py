"""Test what input costs per repeat: idle time, and time beyond tensors in memory."""

from __future__ import annotations

import pytest

from labkit.records.timed_steps import SYNTHETIC, WAYS, FedStep, InputTrace, input_costs

NAN = float("nan")


def turn(way: str, repeat: int, idle: float, compute: float, steps: int = 3) -> list[FedStep]:
    """Return consecutive steps with this idle and compute time in ms."""
    found, now = [], 100.0 * repeat
    for step in range(steps):
        got, stop = now + idle / 1e3, now + (idle + compute) / 1e3
        found.append(FedStep(way, repeat, step, now, got, stop, NAN, NAN))
        now = stop
    return found


TRACE = InputTrace(
    [
        *(*turn("map", 0, 6, 6), *turn(SYNTHETIC, 0, 0, 4)),
        *(*turn(SYNTHETIC, 1, 0, 6), *turn("map", 1, 6, 6)),
        *(*turn("map", 2, 6, 9), *turn(SYNTHETIC, 2, 0, 5)),
    ],
    nbytes=1000,
    filled=0.5,
)


def test_a_step_is_idle_until_its_batch_comes() -> None:
    table = TRACE.to_dataframe()
    assert table["step_ms"].to_numpy() == pytest.approx(table["idle_ms"] + table["compute_ms"])
    costs = input_costs(TRACE)
    assert list(costs.index) == [SYNTHETIC, "map"]  # in the order of WAYS, not of the measurements
    assert list(costs["idle_ms"]) == pytest.approx([0, 6])
    assert costs.loc["map", "idle_share"] == pytest.approx(18 / 39)


def test_the_overhead_is_that_of_pairs_in_one_repeat() -> None:
    own = input_costs(TRACE).loc["map"]
    # The pairs are 12 and 4, 12 and 6, and 15 and 5 ms.
    assert [own[f"overhead{end}"] for end in ("", "_low", "_high")] == pytest.approx([2, 1, 2])
    assert (own["step_ms"], own["step_ms_low"], own["step_ms_high"]) == pytest.approx((12, 12, 15))
    assert input_costs(TRACE).loc[SYNTHETIC, "overhead"] == 0


def test_every_way_but_the_first_is_real_input() -> None:
    assert WAYS[0] == SYNTHETIC
    assert {"in the step", "map", "parallel calls", "prefetch", "cache"} == set(WAYS[1:])
