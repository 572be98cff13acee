"""Test TensorFlow's own strategies: refusals, and that they learn as one process does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from listening import watched

from labkit import Cluster, Experiment, InvalidInput, LabkitError, Network, TFDistribute
from labkit.bench.frameworks import experiments, measure
from labkit.frameworks.namespaces import ADDRESSES, burst
from labkit.strategies import TF_KINDS

SERVERS = {"kind": "parameter_server"}


def given(strategy: dict[str, Any], **fields: Any) -> Experiment:
    return Experiment(**{"workers": 2, "strategy": TFDistribute(**strategy)} | fields)


@pytest.mark.parametrize(
    ("strategy", "fields", "words"),
    [
        ({"kind": "horovod"}, {}, "kind='horovod'"),
        (
            {"cross_device_ops": "hierarchical_copy"},
            {},
            "applies to kind='mirrored', not to 'multi_w",
        ),
        (SERVERS | {"communication": "auto"}, {}, "applies to kind='multi_worker_mirrored'"),
        ({"servers": 2}, {}, "servers=2 applies to kind='parameter_server'"),
        ({"colocated": True}, {}, "colocated=True applies to kind='parameter_server'"),
        (
            SERVERS | {"synchronous": True},
            {},
            "only asynchronous training.*ParameterServer.synchronous=T",
        ),
        ({"synchronous": False}, {}, "only synchronous training with multi_worker"),
        ({"kind": "mirrored"}, {"network": "1GbE"}, "TFDistribute does not support network"),
        ({}, {"network": "1GbE", "workers": 3}, "a real link has two ends; give workers=2"),
        ({}, {"network": "wan"}, "network with latency=.*which has only a bandwidth"),
        (SERVERS | {"colocated": True}, {"network": "1GbE"}, "remove colocated"),
        ({}, {"stragglers": {0: 2.0}}, "TFDistribute does not support stragglers"),
        ({}, {"callbacks": list}, "TFDistribute does not support callbacks"),
        ({}, {"input_mode": "scatter"}, "use input_mode='shard'"),
        ({}, {"precision": "mixed_float16"}, "use precision='mixed_bfloat16'"),
        (
            SERVERS,
            {"batch_weights": (1, 2)},
            "batch_weights are supported with kind='multi_worker",
        ),
        (
            {"kind": "mirrored", "cross_device_ops": "hierarchical_copy"},
            {"workers": 3},
            "omits the last .* workers=3",
        ),
        ({}, {"batch_size": 1436}, "1437 rows has 1 rows, fewer than workers=2"),
        ({}, {"optimizer_options": {"use_ema": True}}, "remove use_ema"),
        ({}, {"optimizer_options": {"clipnorm": 1.0}}, "clipnorm=1.0: within.*remove clipnorm"),
        ({"kind": "mirrored"}, {"optimizer_options": {"clipvalue": 1.0}}, "remove clipvalue"),
        ({}, {"optimizer_options": {"global_clipnorm": 1.0}}, "remove global_clipnorm"),
        ({}, {"dataset": lambda: None, "model": lambda: None}, "a callable data set does not"),
        ({}, {"clock": "virtual"}, "does not run on clock='virtual'"),
    ],
)
def test_what_tensorflow_does_not_do_is_refused_before_a_process_starts(
    strategy: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        given(strategy, **fields)


def test_one_worker_may_clip_and_so_may_servers_which_take_each_gradient_alone() -> None:
    options = {"optimizer_options": {"clipnorm": 1.0}}
    assert given({}, workers=1, **options)
    assert given(SERVERS, **options)


def test_trust_in_a_network_is_recorded_where_it_is_given_and_other_hashes_stay() -> None:
    assert "trusted_network" not in given({}).to_json()["strategy"]
    told = given({"trusted_network": True})
    assert told.to_json()["strategy"]["trusted_network"] is True


def test_one_rank_leads_where_one_process_does() -> None:
    ranks = {kind: given({"kind": kind}, workers=3).ranks for kind in TF_KINDS}
    assert ranks == dict.fromkeys(TF_KINDS, 1) | {"multi_worker_mirrored": 3}


WEIGHTS = 8 * (64 * 16 + 16 + 16 * 10 + 10)  # bytes of the weights in float64


def a_step(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return the bytes per step between each pair of tasks that communicate."""
    sent, steps = record["sent_bytes"], record["counted_steps"]
    return {(a, b): count / steps for a, row in sent.items() for b, count in row.items() if count}


THEIRS = {
    "mirrored": "mirrored_strategy.MirroredStrategy",
    "central_storage": "central_storage_strategy.CentralStorageStrategy",
    "multi_worker_mirrored": "collective_all_reduce_strategy.CollectiveAllReduceStrategy",
    "parameter_server": "parameter_server_strategy_v2.ParameterServerStrategyV2",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TF_KINDS)
def test_tensorflows_own_strategy_does_what_one_process_does(cluster: Cluster, kind: str) -> None:
    asked = experiments([kind], ["mlp"], ["adam"])
    with watched() as reached:
        ((row, record),) = measure(cluster, asked)
    assert reached == set()  # no socket was open to other machines
    assert row["max_abs_difference"] <= 1e-12
    assert record["algorithm"] == f"tensorflow.python.distribute.{THEIRS[kind]}"
    tasks = record["processes"]
    # None of TensorFlow's tasks is a rank of labkit.
    ranks = cluster.call(lambda communicator: os.getpid())
    assert len({*tasks.values(), *ranks}) == len(tasks) + len(ranks)
    crossing = a_step(record)
    if kind == "multi_worker_mirrored":
        assert {*crossing} == {("worker 0", "worker 1"), ("worker 1", "worker 0")}
        # A ring of p workers sends 2 (p - 1)/p of the gradients, and TensorFlow's messages are not
        # much longer.
        assert all(WEIGHTS <= count < 1.2 * WEIGHTS for count in crossing.values())
        assert WEIGHTS <= row["wire_bytes_per_step"] < 1.2 * WEIGHTS
    elif kind == "parameter_server":
        # The worker fetches weights at each step and pushes gradients, which Adam applies at the
        # server.
        assert WEIGHTS <= crossing["ps 0", "worker 0"] < 2 * WEIGHTS
        assert WEIGHTS <= crossing["worker 0", "ps 0"] < 2 * WEIGHTS
        assert {config["task"]["type"] for config in record["tf_config"]} == {
            "chief",
            "worker",
            "ps",
        }
    else:
        assert len(tasks) == 1
        assert not crossing


BITS = 2e6


@pytest.mark.slow
def test_over_a_real_link_a_step_lasts_as_long_as_its_bytes(cluster: Cluster) -> None:
    network = Network(latency=0, bandwidth=BITS / 8)
    try:
        asked = experiments(["multi_worker_mirrored"], ["mlp"], ["sgd"], network)
    except LabkitError as error:  # iproute2 or root is missing
        pytest.skip(str(error))
    ((row, record),) = measure(cluster, asked)
    assert row["max_abs_difference"] <= 1e-12
    assert row["min_ms"] > 1e3 * 8 * (WEIGHTS - burst(int(BITS))) / BITS
    assert WEIGHTS <= a_step(record)["worker 0", "worker 1"] < 1.2 * WEIGHTS
    workers = record["tf_config"][0]["cluster"]["worker"]
    assert [address.split(":")[0] for address in workers] == list(ADDRESSES)


@pytest.mark.slow
def test_two_servers_share_the_weights_at_the_other_end_of_a_real_link(cluster: Cluster) -> None:
    network = Network(latency=0, bandwidth=BITS / 8)
    try:
        (asked,) = experiments(["parameter_server"], ["mlp"], ["sgd"], network)
    except LabkitError:  # iproute2 or root is missing
        (asked,) = experiments(["parameter_server"], ["mlp"], ["sgd"])
    strategy = TFDistribute(**SERVERS, servers=2)
    ((row, record),) = measure(cluster, [asked.replace(strategy=strategy)])
    assert row["max_abs_difference"] <= 1e-12
    crossing = a_step(record)
    parts = [crossing[f"ps {k}", "worker 0"] for k in range(2)]
    assert min(parts) > 0
    assert WEIGHTS <= sum(parts) < 2 * WEIGHTS
    if asked.network is not None:
        # Weights and gradients cross the link one after the other.
        assert row["median_ms"] > 2e3 * 8 * (WEIGHTS - 2 * burst(int(BITS))) / BITS
        spec = record["tf_config"][0]["cluster"]
        hosts = [{each.split(":")[0] for each in spec[job]} for job in ("ps", "worker")]
        assert hosts == [{address} for address in ADDRESSES]


def until(happens: Callable[[], object]) -> None:
    end = time.monotonic() + 240
    while not happens() and time.monotonic() < end:
        time.sleep(0.05)
    assert happens()


def started(ranks: list[int], task: str) -> list[int]:
    """Return the processes of a TensorFlow task that these ranks have started."""
    return [
        each.pid
        for each in psutil.process_iter(["ppid", "cmdline"])
        if each.info["ppid"] in ranks and task in (each.info["cmdline"] or ())
    ]


@pytest.mark.slow
def test_a_killed_worker_is_survived_and_started_anew(cluster: Cluster) -> None:
    data = {"rows": 64, "test_rows": 9}
    asked = given(SERVERS | {"colocated": True}, dataset_options=data, batch_size=32, epochs=2000)
    ranks = cluster.call(lambda communicator: os.getpid())
    live = cluster.submit(asked)
    until(lambda: len(live.rows) > 5 or live.done())
    (first,) = started(ranks, "worker 1")
    os.kill(first, signal.SIGKILL)
    seen = len(live.rows)
    until(lambda: len(live.rows) > seen + 20 or live.done())
    live.stop()
    run = live.result()
    exchange = run.metrics["exchange"]
    assert exchange["started_anew"] == ["worker 1"]
    assert exchange["processes"]["worker 1"] != first
    assert run.status["cause"].startswith("stopped by the user after")
    assert run.metrics["equivalence"]["reason"] == "TFDistribute is not exact"
    assert not any(psutil.pid_exists(pid) for pid in exchange["processes"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("ps 0", "ps 0 ended early, so the weights of ps 0 are lost"),
        ("chief 0", "chief 0 ended early"),
    ],
)
def test_a_killed_server_or_coordinator_ends_the_run_with_its_name(
    cluster: Cluster, task: str, words: str
) -> None:
    data = {"rows": 64, "test_rows": 9}
    asked = given(SERVERS, dataset_options=data, batch_size=32, epochs=2000)
    ranks = cluster.call(lambda communicator: os.getpid())
    live = cluster.submit(asked)
    until(lambda: len(live.rows) > 5 or live.done())
    os.kill(*started(ranks, task), signal.SIGKILL)
    until(live.done)
    with pytest.raises(LabkitError, match=words):
        live.result()
    assert not [pid for each in ("chief", "worker", "ps") for pid in started(ranks, f"{each} 0")]
