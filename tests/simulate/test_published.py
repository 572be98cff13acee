"""Test that published figures agree with their own arithmetic."""

from __future__ import annotations

import pytest

from labkit.simulate import PUBLISHED, Scaling


@pytest.mark.parametrize(
    ("name", "efficiency"),
    [
        ("vishnu-mnist-dnn", [1, 0.36]),
        ("vishnu-mnist-cnn", [1, 0.35]),
    ],
)
def test_efficiencies_are_those_that_were_published(name: str, efficiency: list[float]) -> None:
    assert PUBLISHED[name].efficiency == pytest.approx(efficiency, abs=0.005)


def test_the_cliff_is_there_with_one_gpu_a_node_and_absent_with_eight() -> None:
    one, eight = PUBLISHED["p2.xlarge"].efficiency, PUBLISHED["p2.8xlarge"].efficiency
    assert one[-1] / one[-3] < 0.4
    assert eight[-1] / eight[-3] > 0.9


@pytest.mark.parametrize("curve", PUBLISHED.values(), ids=list(PUBLISHED))
def test_every_curve_has_a_source_and_a_speedup_for_each_number_of_workers(curve: Scaling) -> None:
    assert curve.source
    assert curve.mark in "ADFR"
    assert len(curve.workers) == len(curve.speedup)
