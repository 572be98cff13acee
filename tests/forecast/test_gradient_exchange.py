"""Test forecasts of synchronous steps against closed forms, and for general properties."""

from __future__ import annotations

import math

import pytest
from sample_calibrations import SHAPES, calibration, exactly, experiment

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.compression import Float16, OneBit, TopK
from labkit.exchange import SCHEDULES
from labkit.forecast import CollectiveCost, Forecast, Provenance, Query, allreduce_cost, fits
from labkit.forecast.query import StepForecast
from labkit.network import ComputeTime, Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import closed_form

BUCKETS = {"schedule": "overlap", "bucket_bytes": 400_000, "compressor": Float16()}
SWITCH = Network(latency=1e-4, bandwidth=1e8)
# The size of all variables in bytes; each variable begins at a multiple of 64 bytes.
NBYTES = sum(-(-4 * n // 64) * 64 for pair in SHAPES for n in (pair[0][0] * pair[0][1], *pair[1]))


def at(workers: int, network: Network | None = SWITCH, given=None, **fields: object) -> Forecast:
    strategy = lk.AllReduce(**{"algorithm": "ring"} | fields)
    return experiment(strategy=strategy).forecast(workers, network, given or calibration())


def whole(nbytes: float) -> float:
    """Return the size without the unused bytes after the last variable."""
    return nbytes - (-(-4 * SHAPES[-1][1][0] // 64) * 64 - 4 * SHAPES[-1][1][0])


@pytest.mark.parametrize("name", ["ring", "tree", "rabenseifner", "master_worker", "butterfly"])
def test_a_sequential_step_is_its_own_step_and_a_closed_form(name: str) -> None:
    for workers in (2, 4, 16, 64):
        found = at(workers, algorithm=name)
        own = 3e-3 * 64 / workers + 6e-3
        form = closed_form(name, workers, whole(NBYTES), SWITCH)
        meeting = math.log2(workers) * SWITCH.latency
        assert found.seconds == pytest.approx(own + form + meeting, rel=1e-9)
        assert found.step.parts["wire"] == pytest.approx(form, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("compressor", [None, Float16(), OneBit(), TopK()])
def test_parts_add_up_and_more_bandwidth_is_never_slower(schedule: str, compressor) -> None:
    given = calibration(*([compressor] if compressor else []), width=0.1)
    before = float("inf")
    for bandwidth in (1e6, 1e8, 1e10, 1e12):
        network = Network(latency=1e-5, bandwidth=bandwidth, hosts=2)
        found = at(4, network, given, schedule=schedule, compressor=compressor, algorithm="auto")
        assert found.seconds == pytest.approx(sum(found.step.parts.values()), rel=1e-12)
        assert min(found.step.parts.values()) >= 0
        assert found.seconds <= before * (1 + 1e-9)
        low, high = found.interval
        assert low <= found.seconds <= high
        before = found.seconds


def test_overlap_is_never_slower_and_hides_at_most_the_way_back() -> None:
    free = SWITCH.model_copy(update={"latency": 0.0})
    for bandwidth in (1e6, 1e7, 1e8, 1e9):
        network = free.model_copy(update={"bandwidth": bandwidth})
        one, other = at(4, network), at(4, network, schedule="overlap", bucket_bytes=400_000)
        assert other.seconds <= one.seconds * (1 + 1e-9)
        assert one.seconds - other.seconds <= one.step.parts["backward"] * (1 + 1e-9)
        front = at(4, network, schedule="priority", bucket_bytes=400_000)
        assert front.seconds <= one.seconds * (1 + 1e-9)


@pytest.mark.parametrize("cores", [2, 8])
def test_overlap_hides_nothing_where_ranks_compute_on_all_cores(cores: int) -> None:
    costs = tuple(
        CollectiveCost(
            level="memory",
            algorithm="shared_memory",
            workers=2,
            nbytes=nbytes,
            seconds=exactly(1e-9 * nbytes),
        )
        for nbytes in (1000, 4_000_000)
    )
    known = calibration(collectives=costs)
    given = known.model_copy(update={"machine": {**known.machine, "cores": cores}})
    how = {"schedule": "overlap", "bucket_bytes": 400_000, "algorithm": "shared_memory"}
    found = at(2, None, given, **how)
    assert (found.step.more["hidden"] > 0) == (cores > 2)
    assert (found.step.more["buckets"] > 1) == (cores > 2)
    if cores == 2:
        assert found.seconds == at(2, None, given, algorithm="shared_memory").seconds


def test_one_worker_takes_its_own_step() -> None:
    for schedule in SCHEDULES:
        found = at(1, schedule=schedule)
        assert found.seconds == pytest.approx(3e-3 * 64 + 6e-3, rel=1e-12)
        assert (found.strong_efficiency, found.weak_efficiency) == (
            pytest.approx(1),
            pytest.approx(1),
        )
        assert found.sent == 0


def test_overheads_are_counted_once_a_bucket_and_said_where_there_are_none() -> None:
    given = calibration(overheads={"bucket": 0.25, "meeting": 0.5})
    # A meeting costs two latencies until each of four ranks has heard of all others.
    meeting = 0.5 + 2 * SWITCH.latency
    assert at(4, given=given).step.parts["pack"] == pytest.approx(0.25 + meeting)
    every = at(4, given=calibration(Float16(), overheads={"meeting": 0.5}), **BUCKETS)
    assert every.step.parts["pack"] == pytest.approx(6 * meeting, rel=0.01)  # a little hidden
    assert every.step.more["buckets"] == 6
    assert at(1, given=given).step.parts.get("pack", 0.0) == 0.0
    assert Provenance("bucket", "not measured: counted as 0 s") in at(4).sources


def test_a_further_bucket_is_all_that_was_measured_of_it() -> None:
    free = Network(latency=0.0, bandwidth=1e-3)  # the link is so slow that almost nothing is hidden
    given = calibration(overheads={"bucket": 0.25, "overlap": 0.1})
    found = at(4, free, given, schedule="overlap", bucket_bytes=400_000)
    line = found.step.more["hidden"] + sum(found.step.parts[n] for n in ("pack", "wire"))
    wire = at(4, free, schedule="overlap", bucket_bytes=400_000)
    alone = wire.step.more["hidden"] + wire.step.parts["wire"]
    further = found.step.more["buckets"] - 1
    assert further > 2
    assert line - alone == pytest.approx(0.25 + further * 0.1, abs=1e-3)


def test_one_worker_of_a_law_is_as_efficient_as_itself() -> None:
    law = ComputeTime(seconds=0.1, update=0.05)
    alone = experiment(strategy=lk.AllReduce("ring"), virtual={"compute_time": law}, workers=1)
    found = alone.forecast(1, SWITCH, calibration())
    assert (found.strong_efficiency, found.weak_efficiency) == (pytest.approx(1), pytest.approx(1))


def test_a_gather_decodes_what_all_have_sent_and_a_sum_only_the_mean_and_its_own() -> None:
    given = calibration(Float16(), OneBit())
    size = whole(NBYTES) / 1e6
    sums, gathers = (at(4, given=given, compressor=each) for each in (Float16(), OneBit()))
    assert sums.step.parts["codec"] == pytest.approx(size * (1e-3 + 2 * 2e-3), rel=1e-6)
    assert gathers.step.parts["codec"] == pytest.approx(size * (1e-3 + 5 * 2e-3), rel=1e-6)
    ring = closed_form("allgather_ring", 4, 4 * round(1e4 * size), SWITCH)
    assert gathers.step.parts["wire"] == pytest.approx(ring, rel=1e-6)


def test_here_it_is_as_measured_and_what_was_not_is_refused() -> None:
    costs = tuple(
        CollectiveCost(level=level, algorithm=name, workers=2, nbytes=n, seconds=exactly(s * n))
        for level, name, s in (("host", "mpi", 3e-9), ("memory", "shared_memory", 1e-9))
        for n in (1000, 4_000_000)
    )
    found = at(2, None, calibration(collectives=costs), algorithm="auto")
    assert found.step.parts["wire"] == pytest.approx(1e-9 * whole(NBYTES), rel=1e-6)
    with pytest.raises(
        InvalidInput, match="8 ranks at the same time on one machine were not measured"
    ):
        at(8, None, calibration(collectives=costs))
    with pytest.raises(InvalidInput, match="'mpi' among 4 ranks of one machine was not measured"):
        at(4, None, calibration(collectives=costs), algorithm="mpi")
    with pytest.raises(InvalidInput, match="measure it with `labkit calibrate`"):
        at(4, given=calibration(), compressor=OneBit())


def test_the_slowest_rank_counts() -> None:
    slow = experiment(strategy=lk.AllReduce("ring"), workers=4, stragglers={1: 3.0})
    found = slow.forecast(4, SWITCH, calibration())
    assert found.step.parts["wait"] == pytest.approx(2 * (3e-3 * 16 + 6e-3), rel=1e-9)
    drawn = ComputeTime(seconds=0.1, distribution="exponential")
    waits = [
        experiment(strategy=lk.AllReduce("ring"), virtual={"compute_time": drawn}, workers=n)
        .forecast(n, SWITCH, calibration())
        .step.parts["wait"]
        for n in (1, 4, 16, 64)
    ]
    # The mean maximum of n exponential times is the n-th harmonic number; the wait is 1 less.
    harmonic = [sum(1 / k for k in range(2, n + 1)) for n in (1, 4, 16, 64)]
    assert waits == pytest.approx([0.1 * each for each in harmonic], rel=0.05, abs=1e-3)


def test_intervals_are_as_wide_as_the_network_is_known_and_the_law_is_by_chance() -> None:
    costs = [
        CollectiveCost(level="link", algorithm="ring", workers=2, nbytes=n, seconds=exactly(s))
        for n, s in ((10**5, 1e-3), (10**6, 2e-2), (10**7, 1e-1))
    ]
    known = calibration(collectives=tuple(costs))
    narrow, wide = at(4), at(4, given=known)
    assert narrow.interval == pytest.approx((narrow.seconds, narrow.seconds))
    assert any("too narrow" in source.how for source in narrow.sources)
    asked = Query(experiment(), known, SWITCH)
    assert asked.error == pytest.approx(fits(known)["link"].error * 2.44, rel=1e-2)
    assert wide.interval[1] - wide.seconds == pytest.approx(asked.error * wide.step.parts["wire"])
    law = ComputeTime(seconds=0.1, distribution="exponential")
    for strategy in (lk.AllReduce("ring"), lk.ParameterServer()):
        drawn = experiment(strategy=strategy, virtual={"compute_time": law}, workers=1)
        found = drawn.forecast(1, SWITCH, calibration())
        # The mean of a hundred exponential times has a relative error of 0.1; the 90 % interval
        # extends 1.64 times as far.
        assert 0.05 < found.interval[1] / found.seconds - 1 < 0.25


def test_what_is_beyond_the_measured_is_said_so() -> None:
    def far(found: Forecast) -> dict[str, str]:
        return {source.what: source.how for source in found.sources if "beyond" in source.how}

    given = calibration(Float16(), overheads={"meeting": 0.5})
    assert far(at(2, given=given)) == {}
    wide = experiment(strategy=lk.AllReduce("ring", compressor=Float16()), batch_size=999)
    told = far(wide.forecast(4, SWITCH, given))
    assert "beyond the largest measured (64) rows" in told["forward, backward, update, other"]
    assert told["meeting"] == "measured, beyond the largest measured (2) ranks"
    assert "beyond the largest measured (1e+06)" in told[repr(Float16())]
    served = wide.replace(strategy=lk.ParameterServer(), workers=4)
    assert "(64) rows" in "".join(far(served.forecast(4, SWITCH, given)).values())


def test_every_algorithm_has_a_forecast_on_every_number_of_ranks() -> None:
    for name in ALLREDUCE:
        for workers in (1, 2, 3, 8):
            assert at(workers, algorithm=name).seconds > 0


def test_ten_thousand_ranks_take_no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []
    monkeypatch.setattr(allreduce_cost, "simulate", lambda *a, **k: simulated.append(a))
    hosts = Network(latency=1e-5, bandwidth=1e9, hosts=8, host_bandwidth=1e10)
    for name in ("hierarchical", "two_level"):
        for schedule in ("sequential", "overlap", "priority"):
            found = at(10_000, hosts, algorithm=name, schedule=schedule)
            assert found.seconds > closed_form("ring", 1250, whole(NBYTES) / 8, hosts)
    assert at(10_000).seconds > closed_form("ring", 10_000, whole(NBYTES), SWITCH)
    assert not simulated


def test_a_strategy_without_a_forecast_says_so_and_who_has_one() -> None:
    for strategy in (lk.TFDistribute(), lk.ExternalFramework()):
        with pytest.raises(InvalidInput, match=r"executes its steps in .*use one of AllReduce"):
            strategy.forecast(Query(experiment(), calibration()))


def test_prices_are_as_given() -> None:
    found = experiment(workers=4, strategy=lk.AllReduce("ring")).forecast(
        4,
        SWITCH,
        calibration(),
        price_per_node_hour=2,
        node_watts=300,
        ranks_per_node=2,
        target_steps=1000,
    )
    assert found.training_seconds == pytest.approx(1000 * found.seconds)
    assert found.cost == pytest.approx(2 * 2 * found.training_seconds / 3600)
    assert found.energy == pytest.approx(2 * 300 * found.training_seconds)
    bytes_only = experiment(strategy=lk.AllReduce("ring")).forecast(
        4, SWITCH, calibration(), price_per_gb=5, target_steps=10
    )
    assert bytes_only.cost == pytest.approx(5 * 10 * bytes_only.sent / 1e9)
    # 2 (n - 1) times the buffer, by all ranks together.
    assert bytes_only.sent == pytest.approx(6 * whole(NBYTES))
    served = experiment(strategy=lk.ParameterServer(servers=3, colocated=False)).forecast(
        4, SWITCH, calibration(), node_watts=300, ranks_per_node=2, target_steps=1000
    )
    assert served.energy == pytest.approx(4 * 300 * served.training_seconds)  # seven ranks
    with pytest.raises(
        InvalidInput, match="need the number of ranks on a node; give ranks_per_node"
    ):
        _ = experiment().forecast(2, SWITCH, calibration(), node_watts=3).energy


def test_it_shows_itself() -> None:
    found = at(2)
    assert "90% interval" in str(found)
    assert "rank 0 out" in found._repr_html_()
    told = found.to_json()
    assert told["step_s"] == found.seconds
    assert told["calibration"] == calibration().hash8
    assert isinstance(found.step, StepForecast)
