"""Test forecasts of divided models: times by closed forms, and bytes by their schedules."""

from __future__ import annotations

import re
from typing import Any

import pytest

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.forecast import (
    Calibration,
    LayerCost,
    ModelCost,
    Query,
    Spread,
    StepCost,
    StepForecast,
    model_of,
)
from labkit.forecast.slices import SliceWork, sliced
from labkit.schedules.grid_layers import crossing

WIDTH, ROWS = 100, 24
FAST = lk.Network(latency=1e-3, bandwidth=1e6)
INSTANT = lk.Network(latency=0.0, bandwidth=1e18)
NONE = Spread(median=0.0, low=0.0, high=0.0)


def forecast(
    strategy: lk.Strategy,
    workers: int,
    network: lk.Network,
    weights: tuple[tuple[int, ...], ...] = ((WIDTH, WIDTH), (WIDTH,)),
    **fields: Any,
) -> StepForecast:
    """Return the forecast of six equal layers; a sample takes 1 ms forward and 2 ms backward."""
    experiment = lk.Experiment(
        **{"model": "mlp", "model_options": {"widths": [WIDTH] * 5}} | fields,
        batch_size=ROWS,
        strategy=strategy,
        workers=workers,
    )
    layers = tuple(
        LayerCost(
            name=f"{n}",
            kind="Dense" if len(weights) == 2 else "Conv2D",
            weights=weights,
            out=4 * WIDTH,
            forward=1 / 6,
            backward=1 / 6,
        )
        for n in range(6)
    )
    steps = tuple(
        StepCost(
            rows=rows,
            threads=1,
            together=1,
            update=NONE,
            other=NONE,
            forward=Spread(median=1e-3 * rows, low=0.9e-3 * rows, high=1.1e-3 * rows),
            backward=Spread(median=2e-3 * rows, low=1.8e-3 * rows, high=2.2e-3 * rows),
        )
        for rows in (1, ROWS)
    )
    model = ModelCost(model=model_of(experiment), layers=layers, steps=steps, memory=WIDTH)
    asked = Query(experiment, Calibration(made="then", machine={}, models=(model,)), network)
    return experiment.strategy.forecast(asked)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("cut", [1, 4, 12])
def test_a_pipeline_waits_as_its_closed_form_says(stages: int, cut: int) -> None:
    found = forecast(lk.Pipeline("gpipe", microbatches=cut), stages, INSTANT)
    assert found.more["bubble"] == pytest.approx((stages - 1) / (cut + stages - 1), rel=1e-9)
    each = 3e-3 * ROWS / stages / cut
    assert found.seconds == pytest.approx((cut + stages - 1) * each, rel=1e-9)
    assert 0.9 < found.spread[0] < 1 < found.spread[1] < 1.1


def test_layers_in_turn_wait_for_their_messages() -> None:
    found = forecast(lk.Layerwise(), 3, FAST)
    message = FAST.latency + 4 * WIDTH * ROWS / FAST.bandwidth
    assert found.seconds == pytest.approx(3e-3 * ROWS + 4 * message, rel=1e-9)
    assert found.nbytes["rank 1 out"] == found.nbytes["rank 1 in"] == 2 * 4 * WIDTH * ROWS
    assert found.more["sent"] == 4 * 4 * WIDTH * ROWS


def test_replicas_of_stages_average_what_each_stage_has() -> None:
    one, two = (forecast(lk.Pipeline(stages=2, microbatches=1), n, FAST) for n in (2, 4))
    held = 4 * 3 * (WIDTH + 1) * WIDTH
    mean = 2 * (FAST.latency + held / 2 / FAST.bandwidth)
    message = FAST.latency + 4 * WIDTH * ROWS / 2 / FAST.bandwidth
    assert two.seconds == pytest.approx(3e-3 * ROWS / 2 + 2 * message + mean, rel=1e-9)
    assert one.memory["weights"] == two.memory["weights"] == held


@pytest.mark.parametrize("modules", [2, 3])
def test_unlocked_modules_are_at_least_as_fast_as_the_bound(modules: int) -> None:
    found = forecast(lk.DelayedGradients(), modules, INSTANT)
    speedup = 3e-3 * ROWS / found.seconds
    assert 3 / (1 + 2 / modules) - 1e-9 <= speedup <= modules + 1e-9


def test_a_partition_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"layers with weights \(of 6 layers\)"):
        forecast(lk.Pipeline(stages=7), 7, FAST, model_options={"widths": [WIDTH] * 9})


def test_pairs_add_up_once_each_way() -> None:
    layers = [
        LayerCost(name="", kind=kind, weights=weights, forward=0.1, backward=0.1, out=out)
        for kind, weights, out in (
            ("Dense", ((8, 6), (6,)), 24),
            ("ReLU", (), 24),
            ("Dense", ((6, 4), (4,)), 16),
            ("Dense", ((4, 4), (4,)), 16),
        )
    ]
    half = 1 / 2
    pair = [SliceWork(half), SliceWork(half), SliceWork(half, total=16)]
    assert sliced(layers, 2, True) == [*pair, SliceWork(half, 8, 8, 16, sums=2)]
    assert sliced(layers, 2, False) == [*pair, SliceWork(half, gather=16, back=16)]
    assert sliced(layers, 5, True)[2:] == [SliceWork(half * 0.4, total=16), SliceWork()]


def test_slices_wait_for_their_sums() -> None:
    found = forecast(lk.TensorParallel(), 2, FAST)
    scores, whole = (2 * (FAST.latency + n / 2 / FAST.bandwidth) for n in (4 * ROWS, 400 * ROWS))
    # There are three pairs of layers; the first pair has no layer before it, so there are three
    # sums forward and two backward.
    prompt = found.seconds - found.parts["wait"]
    assert prompt == pytest.approx(3e-3 * ROWS / 2 + 5 * whole, rel=1e-9)
    assert scores < whole


def test_tiles_send_what_crosses() -> None:
    fields: dict[str, Any] = {"model": "locally_connected", "model_options": {}}
    strategy = lk.SpatialParallel((2, 2))
    found = forecast(strategy, 4, INSTANT, dataset="mnist", **fields)
    planes = lk.Experiment(dataset="mnist", **fields).grid_layers
    assert planes is not None
    crosses = crossing(planes, (2, 2))
    values = crosses.values.sum() + crosses.values_back.sum()
    assert found.more["sent"] == pytest.approx(4 * ROWS * values)
    assert found.seconds - found.parts["wait"] == pytest.approx(3e-3 * ROWS / 4, rel=1e-9)


def test_a_slow_rank_holds_up_slices_tiles_and_stages() -> None:
    grid: dict[str, Any] = {"model": "locally_connected", "model_options": {}, "dataset": "mnist"}
    for strategy, fields in (
        (lk.TensorParallel(), {}),
        (lk.SpatialParallel((2, 2)), grid),
        (lk.Pipeline(stages=2), {}),
        (lk.DelayedGradients(), {}),
    ):
        usual = forecast(strategy, 4, INSTANT, **fields).seconds
        for rank in (1, 3):  # one rank of the pipeline in each replica
            slowed = forecast(strategy, 4, INSTANT, stragglers={rank: 3.0}, **fields).seconds
            assert 1.4 * usual < slowed < 3.5 * usual
    chance = lk.Slowdown(compute=3.0, distribution="exponential")
    assert forecast(lk.TensorParallel(), 4, INSTANT, stragglers={1: chance}).parts["wait"] > 0
    with pytest.raises(InvalidInput, match="has no forecast for stages"):
        forecast(lk.Pipeline(), 4, INSTANT, stragglers={1: chance})


def test_links_of_slices_are_those_of_their_ranks() -> None:
    for hosts in (None, 2, ((0, 2), (1, 3))):
        network = FAST.model_copy(update={"hosts": hosts})
        found = forecast(lk.TensorParallel(tensor_parallel_size=2), 4, network)
        sent = {name: n for name, n in found.nbytes.items() if re.fullmatch(r"rank \d out", name)}
        assert len(sent) == 4
        assert sum(sent.values()) == pytest.approx(found.more["sent"])
        apart = 2 * found.memory["gradients"]  # two ranks average the gradients of each slice
        if hosts == 2:  # only sums between replicas use the uplinks
            assert found.nbytes["host 1 out"] == pytest.approx(apart)
        elif hosts:
            assert found.nbytes["host 1 out"] == pytest.approx(found.nbytes["host 0 in"])


def test_values_of_double_precision_are_twice_as_many_bytes_and_tiles_hold_all_kernels() -> None:
    grid: dict[str, Any] = {"model": "locally_connected", "model_options": {}, "dataset": "mnist"}
    for strategy, fields in ((lk.TensorParallel(), {}), (lk.SpatialParallel((2, 2)), grid)):
        single = forecast(strategy, 4, FAST, **fields)
        double = forecast(strategy, 4, FAST, precision="float64", **fields)
        assert double.memory["weights"] == 2 * single.memory["weights"]
        assert double.memory["activations"] == single.memory["activations"]  # as measured
    tiles = forecast(lk.SpatialParallel((2, 2)), 4, FAST, weights=((3, 3, 1, 6),), **grid)
    assert tiles.memory["weights"] == 4 * 6 * 3 * 3 * 6
