"""A host, its link, or Slurm's daemon on it is gone: what goes on, and what the record says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit as lk
from labkit.cluster.calls import RankError
from labkit.cluster.live import Live
from labkit.communicator import Communicator
from labkit.hosts import Testbed
from labkit.hosts.queue import Queue
from labkit.hosts.reach import login
from labkit.records import store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_folder")]

HANG = 100.0  # seconds after which what must happen at once has not


def training() -> lk.Experiment:
    """One that does not end by itself."""
    return lk.Experiment(
        dataset="digits",
        model_options={"widths": [8]},
        batch_size=40,
        workers=4,
        epochs=10_000,
        strategy=lk.AllReduce(algorithm="ring"),
    )


def wait_for(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + HANG
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def live(shared_folder: Path) -> Iterator[Live]:
    """A training in its first epochs."""
    with lk.Cluster(hosts=["a:2", "b:2"]) as cluster:
        running = cluster.submit(training())
        wait_for(lambda: running.epochs)
        yield running


def ended(live: Live) -> tuple[float, str]:
    """Seconds until a training that cannot go on has failed, and the cause in its record."""
    begin = time.monotonic()
    with pytest.raises(RankError):
        live.result()
    seconds = time.monotonic() - begin
    status = store.read_status(live.directory)
    assert status["state"] == "failed"
    return seconds, str(status["cause"])


def test_the_processes_of_a_host_are_killed(bed: Testbed, live: Live) -> None:
    bed.run("b", ["pkill", "-KILL", "-f", "labkit.cluster.engine|prted"])
    seconds, cause = ended(live)
    # Whichever mpiexec hears of first: that a rank has ended, or its own daemon.
    assert "host b is lost" in cause or "rank 2" in cause or "rank 3" in cause
    assert seconds < HANG


def test_a_link_that_comes_back_is_survived_and_one_that_does_not_is_named(
    bed: Testbed, live: Live
) -> None:
    try:
        bed.link_down("b")
        time.sleep(5)
        bed.link_up("b")
        before = len(live.epochs)
        wait_for(lambda: len(live.epochs) > before + 2)
        bed.link_down("b")
        seconds, cause = ended(live)
    finally:
        bed.link_up("b")
    assert "host b with rank 2, 3 has not been heard for" in cause
    assert seconds < HANG


def test_slurms_daemon_is_killed_and_the_job_goes_on(means: None) -> None:
    def go_on(communicator: Communicator) -> int:
        for _ in range(20):
            communicator.clock.sleep(0.1)
            communicator.meet("a step")
        return communicator.rank

    with lk.testbed() as bed:
        with lk.Cluster(workers=4, nodes=2) as cluster:
            bed.run("b", ["pkill", "-KILL", "-x", "slurmd"])
            assert cluster.call(go_on) == [0, 1, 2, 3]
        wait_for(lambda: any(node.trouble for node in Queue(login()).nodes()))
        with pytest.raises(lk.LabkitError, match=r"node b is .* does not answer"):
            lk.Cluster(workers=4, nodes=2, options="--immediate=5")
