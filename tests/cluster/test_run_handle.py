"""Test a submitted experiment on real ranks: it is watched, stopped, left, and found again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from listening import watched

from labkit import (
    AllReduce,
    Cluster,
    ComputeTime,
    Experiment,
    LabkitError,
    ParameterServer,
)
from labkit.cluster.run_handle import LAST, AttachedRun, RunHandle
from labkit.records.stream import FOLDER
from labkit.strategies import Strategy

LONG = {
    "dataset_options": {"rows": 64, "test_rows": 9},
    "model": "linear",
    "workers": 2,
    "batch_size": 32,
    "verify": False,
    "epochs": 20_000,
}


def wait_until(happens: Callable[[], bool]) -> None:
    """Wait until a condition holds, with a long timeout for a busy machine."""
    end = time.monotonic() + 240
    while not happens() and time.monotonic() < end:
        time.sleep(0.05)
    assert happens()


@pytest.fixture
def live(cluster: Cluster) -> Iterator[RunHandle]:
    """Yield a handle of a long training; the training ends with the test."""
    started = cluster.submit(Experiment(**LONG))
    wait_until(lambda: bool(started.rows) or started.done())
    if started.done():
        started.result()  # says why
    yield started
    started.stop()


def test_the_stop_button_ends_all_ranks_after_the_same_step(
    cluster: Cluster, live: RunHandle
) -> None:
    assert not live.done()
    live.panel()
    assert cluster.last_submitted() is live
    live._panel.stop.click()
    run = live.result()
    assert live.result() is run
    assert live.done()
    assert run.status["state"] == "interrupted"
    assert "stopped by the user after" in run.status["cause"]
    steps = run.history.groupby("rank")["step"].max()
    assert steps[0] == steps[1] < 40_000
    assert len(live.rows) == len(run.history)
    assert len(live.epochs) == len(run.metrics["epochs"])
    assert live.progress.share is not None
    assert live.progress.share < 1
    assert "interrupted · stopped by the user" in live._panel._status.value
    assert {"accuracy", "held-out accuracy", "held-out loss"} <= {
        trace["name"] for trace in live._panel.figure.screen.content["data"]
    }
    assert not (run.path / FOLDER).exists()
    assert run.model() is not None


@pytest.mark.slow
def test_it_outlives_an_interrupt_of_the_cell_and_ends_with_one_of_its_wait(
    live: RunHandle,
) -> None:
    def soon_interrupt() -> None:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()

    soon_interrupt()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)  # stands for a cell that does something else
    seen = len(live.rows)
    wait_until(lambda: len(live.rows) > seen)
    assert not live.done()
    soon_interrupt()
    with pytest.raises(KeyboardInterrupt):
        live.result()
    wait_until(live.done)
    assert live.run is not None
    assert live.run.status["state"] == "interrupted"


PLAYED = [
    ParameterServer(),
    ParameterServer(2, synchronous=False),
    AllReduce("ring"),
]


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("strategy", PLAYED, ids=["waits", "applies", "allreduce"])
def test_a_played_run_ends_after_a_step_and_says_how_far_it_came(
    cluster: Cluster, strategy: Strategy
) -> None:
    law = ComputeTime(0.01, update=0.001)
    fields = LONG | {"workers": 3, "virtual": {"compute_time": law}, "stragglers": {1: 3.0}}
    with watched() as open_to_others:
        live = cluster.submit(Experiment(**fields, strategy=strategy))
        wait_until(lambda: len(live.rows) > 30 or live.done())
        live.panel()
        live._panel.stop.click()
        run = live.result()
    assert open_to_others == set()
    assert run.status["state"] == "interrupted"
    steps = run.history.groupby("rank").size()
    assert len(steps) == 3
    assert (run.history.groupby("rank")["step"].max() + 1 == steps).all()
    reached = str(steps.min()) if steps.min() == steps.max() else f"{steps.min()} to {steps.max()}"
    assert (steps.min() < steps.max()) == (strategy is PLAYED[1])
    assert run.status["cause"] == f"stopped by the user after {reached} steps"
    assert steps.sum() < 3 * 2 * LONG["epochs"]
    # Every computed gradient was applied, and every reported epoch was complete.
    if not run.update_log.empty:
        assert len(run.update_log) == steps.sum() * run.update_log["server"].nunique()
    assert all(epoch["step"] * 3 <= steps.sum() for epoch in run.metrics["epochs"])
    assert run.model() is not None
    assert live.progress.share is not None
    assert live.progress.share < 1


def test_an_interrupt_of_the_wait_ends_a_played_run(cluster: Cluster) -> None:
    fields = LONG | {"workers": 2, "virtual": {"compute_time": 0.01}}
    live = cluster.submit(Experiment(**fields, strategy="ParameterServer"))
    wait_until(lambda: bool(live.rows) or live.done())
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        live.result()
    assert live.run is not None
    count = live.run.history["step"].max() + 1
    assert live.run.status["cause"] == f"stopped by the user after {count} steps"
    assert live.run.metrics["samples_per_second"] > 0


@pytest.mark.slow
def test_another_process_finds_watches_and_stops_it(cluster: Cluster, live: RunHandle) -> None:
    # As in a notebook, the cluster also registers magics in this process, while its ranks work.
    other = f"""
import labkit, time
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
live = labkit.Cluster(workers=2, name={cluster.name!r}).last_submitted()
while not live.rows:
    time.sleep(0.05)
print(live.experiment.workers, flush=True)
live.stop()
run = live.result()
print(run.status["state"], len(run.history) == len(live.rows))
"""
    said = subprocess.run(
        [sys.executable, "-c", other], capture_output=True, text=True, timeout=240
    )
    assert said.stdout.split() == ["2", "interrupted", "True"], said.stderr
    run = live.result()
    assert run.status["state"] == "interrupted"
    ended = AttachedRun(run.path)  # a finished run is found as well, with all its rows
    assert ended.result() == run
    assert len(ended.rows) == len(run.history)
    assert len(ended.epochs) == len(live.epochs)


@pytest.mark.slow
def test_who_closes_the_cluster_stops_what_was_submitted_there(cluster: Cluster) -> None:
    with Cluster(workers=4, name=cluster.name) as mine:
        live = mine.submit(Experiment(**LONG))
        wait_until(lambda: len(live.rows) > 0)
    assert live.done()
    assert live.result().status["state"] == "interrupted"
    assert cluster.call(lambda communicator: communicator.rank) == [0, 1, 2, 3]


def test_one_call_waits_for_the_other_in_one_process_too(cluster: Cluster) -> None:
    live = cluster.submit(Experiment(**LONG | {"epochs": 3}))
    assert cluster.call(lambda communicator: communicator.rank) == [0, 1, 2, 3]
    assert live.progress.steps > 0
    assert live.result().status["state"] == "completed"


def test_a_cluster_that_has_had_no_experiment_says_so(cluster: Cluster) -> None:
    (cluster.folder / LAST).unlink(missing_ok=True)
    with pytest.raises(
        LabkitError, match=r"no experiment was submitted .* use submit\(experiment\)"
    ):
        cluster.last_submitted()


@pytest.mark.slow
def test_ranks_end_when_the_process_that_would_keep_their_result_is_gone(
    cluster: Cluster,
) -> None:
    child = f"""
import labkit, os, time
live = labkit.Cluster(workers=2, name={cluster.name!r}).submit(labkit.Experiment(**{LONG!r}))
while not live.rows:
    time.sleep(0.05)
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", child], timeout=240, capture_output=True)
    live = cluster.last_submitted()
    run = live.result()
    assert live.rows
    assert run.status["state"] == "interrupted"
    assert run.status["cause"] == "its process is gone"
    begin = time.monotonic()
    assert cluster.call(lambda communicator: communicator.rank) == [0, 1, 2, 3]
    assert time.monotonic() - begin < 100  # 20,000 epochs would take far longer
