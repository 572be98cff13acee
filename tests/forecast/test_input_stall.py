"""Test that a forecast step lasts at least as long as reading its batch, counted once."""

from __future__ import annotations

import pytest
from sample_calibrations import calibration, exactly, experiment

import labkit as lk
from labkit.forecast import Forecast, Spread
from labkit.forecast.forecast import forecast
from labkit.strategies import Strategy

LINK = lk.Network(latency=0.0, bandwidth=1e18)
STEP = 3e-3 * 32 + 6e-3  # seconds of a rank's step with half of the batch


def asked(read: dict[int, Spread] | None, strategy: Strategy | str = "AllReduce") -> Forecast:
    own = experiment(workers=2, strategy=strategy)
    return forecast(own, calibration(read=read), LINK)


def test_what_a_step_hides_of_reading_takes_nothing() -> None:
    usual = asked(None)
    found = asked({32: exactly(0.9 * STEP)})
    assert found.step.parts["read"] == 0
    assert found.seconds == pytest.approx(usual.seconds, rel=1e-12)
    assert dict(usual.sources)["read"] == "not measured: counted as 0 s"
    assert dict(found.sources)["read"].startswith("measured; the previous step hides")


def test_what_it_does_not_hide_is_a_part_of_it() -> None:
    usual = asked(None)
    reading = Spread(median=2 * STEP, low=1.5 * STEP, high=3 * STEP)
    found = asked({32: reading})
    assert found.seconds == pytest.approx(reading.median)
    assert found.step.parts["read"] == pytest.approx(reading.median - usual.seconds)
    assert found.interval == pytest.approx((reading.low, reading.high))
    assert f"read {1e3 * found.step.parts['read']:.3g} ms" in str(found)


def test_a_slow_network_hides_reading_too() -> None:
    own = experiment(workers=2, strategy=lk.AllReduce(algorithm="ring"))
    slow = lk.Network(latency=1.0, bandwidth=1e9)
    plain, fed = (forecast(own, calibration(read=each), slow) for each in ({}, {32: exactly(1.5)}))
    assert plain.step.parts["wire"] > 1.5
    assert fed.seconds == pytest.approx(plain.seconds)


def test_reading_is_on_the_line_between_measured_batches_and_counts_for_one_rank_alone() -> None:
    found = asked({16: exactly(1.0), 48: exactly(2.0)})
    assert found.seconds == pytest.approx(1.5)
    assert found.own == pytest.approx(1.5)
    assert found.weak_efficiency == pytest.approx(1.0)
    assert found.alone == pytest.approx(2.5)
    assert dict(found.sources)["read"].startswith("measured;")
    assert (
        "beyond the smallest measured (48) rows" in dict(asked({48: exactly(2.0)}).sources)["read"]
    )


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        (lk.Pipeline(microbatches=4), 64),
        (lk.TensorParallel(), 64),
        (lk.ParameterServer(), 32),
        (lk.AllReduce(), 32),
    ],
    ids=repr,
)
def test_who_shares_a_model_reads_whole_batches(strategy: Strategy, rows: int) -> None:
    found = asked({32: exactly(32.0), 64: exactly(64.0)}, strategy)
    assert found.step.rows == rows
    assert found.seconds == pytest.approx(rows)


def test_on_the_virtual_clock_nobody_reads() -> None:
    own = experiment(workers=2, clock="virtual")
    found = forecast(own, calibration(read={32: exactly(9.0)}), LINK)
    assert found.seconds < 1
    assert "read" not in found.step.parts
