"""Test programs simulated without values: same times and bytes as programs with values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_programs import FAST, SIZE
from sample_programs import play as played

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.forecast import (
    Calibration,
    CodecCost,
    LayerCost,
    ModelCost,
    Query,
    Spread,
    StepCost,
    StepForecast,
    model_of,
)
from labkit.forecast.meta_vector import MetaVector
from labkit.forecast.programs import run_program
from labkit.forecast.workers import Crowd
from labkit.strategies import STRATEGIES, Strategy

NBYTES = 4 * SIZE * 8  # bytes of the model's weights
ONE = Spread(median=0.1, low=0.1, high=0.1)
NONE = Spread(median=0.0, low=0.0, high=0.0)


def asked(strategy: lk.Strategy, workers: int, steps: int = 60, **fields: Any) -> Query:
    """Return a query for a model of four weight vectors, with two rows for each worker."""
    rows = 2 * workers * steps
    given = {"virtual": {"compute_time": 0.1}, "network": FAST, "precision": "float64", "seed": 0}
    given |= {"dataset": (np.zeros((rows, 3)), np.zeros((rows, 1))), "batch_size": 2 * workers}
    experiment = lk.Experiment(strategy=strategy, workers=workers, **given | fields)
    layers = tuple(
        LayerCost(name=f"{n}", kind="", weights=((SIZE,),), forward=0.25, backward=0.25, out=8)
        for n in range(4)
    )
    parts = {"forward": ONE, "backward": ONE, "update": NONE, "other": NONE}
    step = StepCost(rows=2, threads=1, together=1, **parts)
    model = ModelCost(model=model_of(experiment), layers=layers, steps=(step,))
    codec = CodecCost(
        compressor=lk.QSGD(levels=127).to_json(),
        nbytes=NBYTES // 2,
        payload=100,
        encode=ONE,
        decode=ONE,
    )
    known = Calibration(made="then", machine={}, models=(model,), codecs=(codec,))
    return Query(experiment, known, FAST)


def forecast(strategy: lk.Strategy, workers: int, **fields: Any) -> StepForecast:
    own = asked(strategy, workers, **fields)
    return own.experiment.strategy.forecast(own)


PLAYED = (
    lk.ParameterServer(1),
    lk.ParameterServer(2, colocated=True, placement="sharded"),
    lk.ParameterServer(2, synchronous=False),
    lk.StaleSynchronous(2, staleness_correction="delay_compensated"),
    lk.SoftSync(2),
    lk.Downpour(3, push_every=2),
    lk.ParameterAveraging(4, outer_optimizer="nesterov"),
    lk.ParameterAveraging(6, fragments=2, overlap_steps=1),
    lk.AsynchronousDiLoCo(3, momentum_delay=2),
    lk.ElasticAveraging(period=2),
    lk.ElasticAveraging(period=2, center="allreduce"),
    lk.Gossip(),
    lk.Gossip("exponential"),
    lk.Gossip("random_pairs", asynchronous=True),
    lk.Codistillation(2, exchange="weights"),
)


@pytest.mark.parametrize("strategy", PLAYED, ids=repr)
def test_times_and_bytes_are_those_of_the_virtual_clock(strategy: Any) -> None:
    compute = lk.ComputeTime(0.1, distribution="lognormal", sigma=0.3, update=0.02)
    slow = {1: lk.Slowdown(compute=2.0)}
    own = asked(strategy, 4, virtual={"compute_time": compute}, stragglers=slow)
    hollow = [row for _, row in run_program(own, 1, Crowd(strategy, 4)).rows]
    _, scenes, _ = played(strategy, 4, steps=60, compute=compute, slow=slow, update=0.02, seed=0)
    known = {(row["rank"], row["step"]): row for row in scenes.rows}
    names = ("seconds", "compute_seconds", "wait_seconds", "wire_bytes", "messages")
    assert len(hollow) >= 4 * 40
    for row in hollow:
        there = known.get((row["rank"], row["step"]))
        if there is not None and row["step"] < 45:  # only steps before training nears its end
            assert [row[n] for n in names] == pytest.approx([there[n] for n in names], rel=1e-9)


@pytest.mark.parametrize("workers", [2, 4, 16, 64, 10_000])
def test_a_synchronous_server_takes_what_the_formula_says(workers: int) -> None:
    found = forecast(lk.ParameterServer(1), workers)
    step = 0.1 + 2 * (workers * NBYTES / FAST.bandwidth + FAST.latency)
    assert found.seconds == pytest.approx(step, rel=1e-9)
    assert found.more["sent"] == pytest.approx(2 * workers * NBYTES)
    assert max(found.nbytes.values()) == pytest.approx(workers * NBYTES)
    assert found.spread[0] <= 1 <= found.spread[1]


def test_few_take_what_many_take() -> None:
    workers = 12
    strategy = lk.ParameterServer(workers, colocated=True, placement="sharded")
    whole = run_program(asked(strategy, workers), 1, Crowd(strategy, workers)).seconds
    assert forecast(strategy, workers).seconds == pytest.approx(whole, rel=0.1)


def test_few_that_meet_meet_as_many() -> None:
    # At the end of each epoch (one step here), all workers agree on one number by a ring allreduce.
    found = forecast(lk.Gossip(), 64, steps=1)
    neighbours = FAST.latency + 2 * (NBYTES + 8) / FAST.bandwidth
    ring = 2 * 63 * (FAST.latency + 8 / 64 / FAST.bandwidth)
    assert found.seconds == pytest.approx(max(0.1, neighbours) + ring, rel=1e-6)


def test_who_waits_for_nobody_is_no_slower() -> None:
    slow = {2: lk.Slowdown(compute=4.0)}
    for servers in (1, 2):
        one, other = (
            forecast(lk.ParameterServer(servers, synchronous=waits), 4, stragglers=slow).seconds
            for waits in (False, True)
        )
        assert one <= other


def test_the_same_question_has_the_same_answer() -> None:
    for strategy in (lk.ParameterServer(2, synchronous=False), lk.Gossip(asynchronous=True)):
        compute = lk.ComputeTime(0.1, distribution="exponential")
        one, other = (forecast(strategy, 6, virtual={"compute_time": compute}) for _ in range(2))
        assert one == other


def test_parts_add_up_and_meetings_are_shared_by_a_period() -> None:
    one, many = (forecast(lk.ParameterAveraging(period), 4) for period in (1, 10))
    assert one.seconds - 0.1 == pytest.approx(10 * (many.seconds - 0.1), rel=1e-6)
    assert sum(one.parts.values()) == one.seconds
    assert one.parts["forward"] + one.parts["backward"] == pytest.approx(0.1)


def test_what_is_compressed_has_its_bytes_and_takes_its_time() -> None:
    fields: dict[str, Any] = {"clock": "wall", "virtual": None}
    found = forecast(lk.ParameterServer(1, compressor=lk.QSGD(levels=127)), 2, **fields)
    assert found.more["sent"] == pytest.approx(2 * 2 * 100)
    # A worker encodes a push and decodes an answer.
    assert found.parts["codec"] == pytest.approx(0.2)
    meets = forecast(lk.ParameterAveraging(1, compressor=lk.QSGD(levels=127)), 2, **fields)
    # Each worker also decodes what both workers sent.
    assert meets.parts["codec"] == pytest.approx(0.1 + 3 * 0.1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_all_have_a_forecast_or_say_why_not(name: str) -> None:
    given: dict[str, Any] = {"clock": "wall", "virtual": None}
    kind = STRATEGIES[name]
    if kind.forecast is Strategy.forecast or name == "SpatialParallel":
        with pytest.raises(InvalidInput, match=r"(\w+\W+){6}"):
            forecast(kind(), 4, **given)
        return
    found = forecast(kind(), 4, **given)
    assert found.seconds > 0
    assert min(found.parts.values()) >= 0


def test_hollow_vectors_weigh_what_they_stand_for() -> None:
    one, whole = MetaVector(6), np.zeros(6, np.float32)
    for each in (one, whole):
        made = np.concatenate(
            [(np.float32(2) * each - each / 3)[1:4], np.append(each, np.float32(1))]
        )
        made += made
        assert (made.nbytes, made.size) == (4 * 10, 10)
        assert np.empty_like(each, shape=3).nbytes == 12
