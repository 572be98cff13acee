"""Test the excess of whole steps over their parts: measured in one place, applied in another."""

from __future__ import annotations

import pytest
from sample_calibrations import calibration, exactly, experiment

import labkit as lk
from labkit.compression import Float16
from labkit.forecast import Calibration, Forecast, Provenance, WayCost, model_of
from labkit.forecast.residual_correction import interpolate_points
from labkit.network import Network

FAST, BETWEEN, SLOW, SLOWER = (
    Network(name=f"{speed:g}", latency=1e-4, bandwidth=speed) for speed in (1e8, 3e7, 1e7, 1e5)
)
MORE, SHARE = 2e-3, 0.25  # excess of a whole step: seconds, and a share of its network time
RING = lk.AllReduce(algorithm="ring")
PARTS = calibration(Float16(), width=0.01)


def at(
    network: Network | None,
    known: Calibration = PARTS,
    strategy: lk.AllReduce = RING,
    rows: int = 64,
) -> Forecast:
    workers = 1 if network is None else 2
    fields = {"workers": workers, "network": network, "batch_size": rows, "strategy": strategy}
    return experiment(**fields).forecast(calibration=known)


def more(found: Forecast) -> float:
    return MORE + SHARE * found.step.parts.get("wire", 0.0)


def way(network: Network | None, rows: int = 32, *runs: float, strategy=RING) -> WayCost:
    """Return a measured step that lasts as its parts plus the excess, times each factor in runs."""
    own = at(network, strategy=strategy, rows=rows)
    return WayCost(
        model=model_of(experiment()),
        strategy=strategy.to_json(),
        workers=1 if network is None else 2,
        threads=1,
        batch=rows,
        network=network,
        runs=[factor * (own.seconds + more(own)) for factor in runs or (1.0, 1.0)],
    )


def knowing(*ways: WayCost) -> Calibration:
    return PARTS.model_copy(update={"ways": ways})


def whole(found: Forecast) -> Provenance:
    return found.sources[-1]


def test_what_lies_on_a_line_over_the_network_is_exact() -> None:
    known = knowing(way(FAST), way(SLOW))
    for network in (FAST, BETWEEN, SLOW):
        parts, found = at(network), at(network, known)
        assert found.seconds == pytest.approx(parts.seconds + more(parts), rel=1e-9)
        assert found.seconds == pytest.approx(sum(found.step.parts.values()))
        assert whole(found).how == "measured, on 1e+07 and 1e+08 with 32 rows (2 runs)"


def test_far_beyond_what_was_measured_the_line_ends() -> None:
    parts, found = at(SLOWER), at(SLOWER, knowing(way(FAST), way(SLOW)))
    ends = [more(at(each)) for each in (FAST, SLOW)]
    assert found.seconds - parts.seconds == pytest.approx(ends[1] + 0.5 * (ends[1] - ends[0]))
    much_less = knowing(way(FAST, 32, 0.01), way(SLOW, 32, 0.01))
    assert at(FAST, much_less, rows=8).seconds == pytest.approx(0.5 * at(FAST, rows=8).seconds)


def test_where_nothing_is_known_parts_are_the_forecast() -> None:
    other = way(FAST, strategy=lk.AllReduce(algorithm="tree"))
    parts, found = at(BETWEEN), at(BETWEEN, knowing(other))
    assert (found.seconds, found.interval) == (parts.seconds, parts.interval)
    assert (
        whole(found).how == "the sum of the parts of a step, because whole steps were not measured"
    )
    known = knowing(way(FAST), way(SLOW))
    apart, here = (experiment(workers=2).forecast(2, BETWEEN, each) for each in (PARTS, known))
    assert apart.seconds == here.seconds
    assert whole(here) == whole(found)


def test_another_compressor_is_the_nearest_neighbour() -> None:
    lossy = RING.model_copy(update={"compressor": Float16()})
    parts, found = (at(BETWEEN, each, lossy) for each in (PARTS, knowing(way(BETWEEN))))
    assert found.seconds == pytest.approx(parts.seconds + more(at(BETWEEN, rows=32)))
    assert whole(found).how.startswith("measured with another compressor, on 3e+07")
    own = knowing(way(BETWEEN), way(BETWEEN, strategy=lossy))
    assert whole(at(BETWEEN, own, lossy)).how.startswith("measured, on 3e+07")


def test_the_batch_that_is_nearest_counts() -> None:
    known = knowing(way(FAST, 16, 2.0, 2.0), way(FAST, 128))
    parts, found = at(FAST, rows=100), at(FAST, known, rows=100)
    assert found.seconds == pytest.approx(parts.seconds + more(at(FAST, rows=128)))


def test_one_rank_is_on_a_line_between_batches() -> None:
    known = knowing(way(None, 16), way(None, 48))
    parts, found = at(None, rows=24), at(None, known, rows=24)
    assert found.seconds == pytest.approx(parts.seconds + MORE)
    assert found.strong_efficiency == pytest.approx(1)
    assert whole(found).how == "measured with one rank, by interpolation (2 runs)"
    two = at(FAST, known)
    assert two.alone == pytest.approx(at(FAST).alone + MORE)


def test_the_interval_grows_with_what_runs_differ_by() -> None:
    widths = []
    for differ in (0.0, 0.02, 0.1):
        runs = (1 - differ, 1.0, 1 + differ)
        low, high = at(BETWEEN, knowing(way(FAST, 32, *runs), way(SLOW, 32, *runs))).interval
        widths.append(high - low)
    assert widths == sorted(widths)
    usual = at(BETWEEN, knowing(way(FAST), way(SLOW)))
    # With three runs each, the 90 % interval comes close to the widest pair of factors, 0.9 and
    # 1.1.
    assert widths[-1] / usual.seconds == pytest.approx(1.1 / 0.9 - 0.9 / 1.1, abs=0.05)


@pytest.mark.parametrize(
    "strategy",
    [RING, lk.ParameterServer(), lk.Pipeline(microbatches=2), lk.TensorParallel()],
    ids=lambda each: type(each).__name__,
)
def test_efficiency_has_what_one_rank_takes_more_on_both_sides(strategy: lk.Strategy) -> None:
    def strong(workers: int, known: Calibration) -> float:
        own = experiment(workers=workers, strategy=strategy, batch_size=64)
        return own.forecast(workers, FAST, known).strong_efficiency

    known = knowing(*(way(None, rows, 1.0, 1.0) for rows in (16, 32, 64)))
    for workers in (2, 3):
        assert strong(workers, known) <= 1
        assert strong(workers, known) == pytest.approx(strong(workers, PARTS), rel=0.05)


@pytest.mark.parametrize("more", [0.5, 2.0])
def test_a_whole_step_hides_reading_and_is_no_shorter_than_it(more: float) -> None:
    step = at(FAST).seconds
    slow = calibration(Float16(), width=0.01, read={32: exactly(1.5 * step)})
    known = slow.model_copy(update={"ways": (way(FAST, 64, more, more),)})
    assert at(FAST, known).seconds == pytest.approx(max(1.5, more) * step, rel=0.1)


@pytest.mark.parametrize(
    ("points", "at", "found"),
    [
        ([(1.0, 3.0)], 1.0, (3.0, 0.0)),
        ([(1.0, 3.0)], 4.0, (3.0, 2.25)),
        ([(1.0, 2.0), (1.0, 4.0), (2.0, 5.0), (2.0, 5.0)], 0.5, (2.0, 1.5)),
        ([(1.0, 3.0), (1.0, 5.0)], 1.0, (4.0, 1.0)),
        ([(2.0, 5.0), (1.0, 3.0)], 1.5, (4.0, 0.5)),
        ([(1.0, 3.0), (2.0, 5.0), (4.0, 5.0)], 3.0, (5.0, 0.0)),
        ([(1.0, 3.0), (2.0, 5.0)], 9.0, (6.0, 0.5)),
        ([(1.0, 3.0), (2.0, 5.0)], 0.0, (2.0, 0.5)),
    ],
)
def test_a_line_goes_on_by_half_of_its_length(points, at, found) -> None:
    assert interpolate_points(points, at) == pytest.approx(found)
