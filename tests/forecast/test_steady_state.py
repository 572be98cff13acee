"""Test that simulating two equal cycles predicts the same as simulating the whole training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sample_programs import FAST
from test_programs_forecast import asked

import labkit as lk
from labkit.forecast.programs import COMPARED, SteadyStateDetector, run_program
from labkit.forecast.workers import Crowd

NEVER = ((0, 999_999, 1.0),)  # a delayed gradient in a step that is never simulated
NETWORKS = (
    *(FAST, lk.Network.named("10GbE"), lk.Network(latency=1e-3, bandwidth=2e4)),
    *(lk.Network(latency=1e-4, bandwidth=1e6, sharing="fifo"), None),
    lk.Network(latency=1e-4, bandwidth=1e6, hosts=2, host_bandwidth=1e7),
)
SLOW: tuple[dict[int, lk.Slowdown], ...] = (
    *({}, {1: lk.Slowdown(compute=2.0)}, {0: lk.Slowdown(transfer=3.0)}),
    {0: lk.Slowdown(compute=1.3), 1: lk.Slowdown(compute=1.7, transfer=2.0)},
)
SYNCHRONOUS = (
    lk.ParameterServer(1),
    lk.ParameterServer(3, placement="greedy"),
    lk.ParameterServer(2, colocated=True, placement="sharded"),
    lk.ParameterServer(1, backup_workers=1),
    lk.StaleSynchronous(0),
    lk.ParameterAveraging(1),
    lk.ParameterAveraging(8),
    lk.ParameterAveraging(4, outer_optimizer="nesterov", optimizer_state="average"),
    lk.ParameterAveraging(9, fragments=3, overlap_steps=2),
    lk.ElasticAveraging(center="allreduce", alpha=0.01, period=3),
    lk.Gossip(),
    lk.Gossip("exponential"),
    lk.Codistillation(2),
    lk.BlockCoordinateDescent("round_robin"),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    strategy=st.sampled_from(SYNCHRONOUS),
    workers=st.integers(2, 12),
    network=st.sampled_from(NETWORKS),
    slow=st.sampled_from(SLOW),
    compute=st.sampled_from((0.1, 0.001, lk.ComputeTime(0.02, update=0.01))),
)
def test_what_is_left_out_changes_nothing(
    strategy: Any, workers: int, network: Any, slow: Any, compute: Any
) -> None:
    virtual = {"compute_time": compute}
    quick, whole = (
        strategy.forecast(
            replace(
                asked(
                    strategy, workers, stragglers=slow, virtual=virtual | {"message_delays": late}
                ),
                network=network,
            )
        )
        for late in ((), NEVER)
    )
    for name in ("parts", "nbytes", "memory", "more"):
        assert getattr(quick, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-12)
    assert (quick.seconds, *quick.spread) == pytest.approx((whole.seconds, *whole.spread), rel=1e-9)


@pytest.mark.parametrize("workers", [4, 16])
@pytest.mark.parametrize(
    ("strategy", "cycle", "steps"),
    [
        (lk.ParameterServer(1), 1, 2),
        (lk.ParameterServer(2, colocated=True, placement="sharded"), 1, 2),
        (lk.ParameterAveraging(8), 8, 16),
        (lk.ElasticAveraging(center="allreduce", alpha=0.01, period=3), 3, 9),
        (lk.Gossip(), 1, 2),
    ],
    ids=repr,
)
def test_few_steps_are_played_where_all_are_alike(
    strategy: Any, cycle: int, steps: int, workers: int
) -> None:
    found = run_program(asked(strategy, workers), cycle, Crowd(strategy, workers))
    assert max(row["step"] for _, row in found.rows) == steps - 1


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        (
            lk.ParameterServer(1),
            {"virtual": {"compute_time": lk.ComputeTime(0.1, distribution="exponential")}},
        ),
        (
            lk.ParameterServer(1),
            {"virtual": {"compute_time": lk.ComputeTime(trace=(0.1, 0.1, 0.1, 0.3))}},
        ),
        (
            lk.ParameterServer(1),
            {"stragglers": {1: lk.Slowdown(compute=2.0, distribution="uniform")}},
        ),
        (lk.ParameterServer(1), {"stragglers": {1: lk.Slowdown(pause=(1.0, 2.0))}}),
        (
            lk.ParameterServer(1),
            {"virtual": {"compute_time": 0.1, "message_delays": ((0, 20, 1.0),)}},
        ),
        (lk.ParameterServer(1, synchronous=False), {}),
        (lk.SoftSync(2), {}),
        (lk.ElasticAveraging(period=1), {}),
        (lk.Gossip("random_pairs"), {}),
        (lk.Gossip(), {"steps": 5}),  # 5 steps are an epoch, which ends with an agreement
        (lk.BlockCoordinateDescent(), {}),
    ],
    ids=repr,
)
def test_what_varies_is_played_to_its_end(strategy: Any, fields: dict[str, Any]) -> None:
    own = asked(strategy, 4, **fields)
    found = run_program(own, 1, Crowd(strategy, 4))
    assert len(found.batch_seconds) == 30


@pytest.mark.parametrize("by_chance", [{"jitter": 1e-3}, {"sharing": "fifo"}], ids=repr)
def test_chance_on_a_network_is_played_to_its_end(by_chance: dict[str, Any]) -> None:
    strategy = lk.ParameterServer(1)
    own = replace(asked(strategy, 4), network=FAST.model_copy(update=by_chance))
    found = run_program(own, 1, Crowd(strategy, 4))
    assert len(found.batch_seconds) == 30


def rows(*steps: tuple[int, float, float]) -> list[tuple[float, dict[str, float]]]:
    """Return step records from tuples of rank, end time and duration (s)."""
    about = dict.fromkeys(COMPARED, 0.0)
    return [(end, {**about, "rank": rank, "seconds": seconds}) for rank, end, seconds in steps]


def test_two_cycles_are_alike_where_all_last_as_long_and_nobody_is_a_cycle_ahead() -> None:
    together = rows((0, 1.0, 1.0), (1, 1.5, 1.5), (0, 2.0, 1.0), (1, 2.5, 1.0), (0, 3.0, 1.0))
    steady = SteadyStateDetector(2, 1, 9)
    assert not steady.reached(together[:4])  # the first step of rank 1 took longer
    assert not steady.reached(together)  # rank 1 has not ended its third step
    assert steady.reached([*together, *rows((1, 3.5, 1.0))])
    apart = rows((0, 1.0, 1.0), (1, 2.0, 2.0), (0, 2.0, 1.0), (1, 4.0, 2.0))
    assert not SteadyStateDetector(2, 1, 9).reached(apart)  # each rank keeps its own pace
    ahead = rows((0, 1.0, 1.0), (0, 2.0, 1.0), (1, 3.5, 1.0), (1, 4.5, 1.0))
    assert not SteadyStateDetector(2, 1, 9).reached(ahead)
    assert not SteadyStateDetector(2, 1, 2).reached([*together, *rows((1, 3.5, 1.0))])  # too late
