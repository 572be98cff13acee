"""Test engines that start before a notebook needs them: its first cluster uses or ends them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from left import PATIENCE, left_of, processes

from labkit import Cluster
from labkit.cluster import early_start, launch, lease
from labkit.cluster.start import Start
from labkit.hosts.host_list import Host

# Starts engines early, prints a line, and waits until a signal kills it.
STARTS = """
from labkit.cluster import early_start
from labkit.cluster.start import Start

with early_start.early_engines(Start(1)):
    print(flush=True)
    input()
"""


@pytest.mark.parametrize("how", [None, Start(2, launcher="hosts", hosts=(Host("a", 2),))])
def test_what_is_not_known_or_elsewhere_is_not_started(
    own_runtime: Path, how: Start | None
) -> None:
    with early_start.early_engines(how):
        assert processes(own_runtime) == []


def wait_until(folder: Path, *states: str) -> None:
    end = time.monotonic() + PATIENCE
    while launch.state(folder)["state"] not in states:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_the_first_cluster_takes_them_and_they_end_with_it(own_runtime: Path) -> None:
    with early_start.early_engines(Start(1)):
        wait_until(lease.folder_of(lease.default_name(Start(1))), "starting", "ready")
        with Cluster(workers=1) as cluster:
            assert cluster.state()["warm"]
            assert cluster.call(lambda communicator: communicator.rank) == [0]
        assert left_of(own_runtime) == []


@pytest.mark.slow
def test_what_nobody_takes_ends_with_who_started_it(own_runtime: Path) -> None:
    with early_start.early_engines(Start(1)):
        wait_until(lease.folder_of(lease.default_name(Start(1))), "ready")
    assert left_of(own_runtime) == []


@pytest.mark.slow
def test_kill_9_of_who_started_them_leaves_nothing(own_runtime: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
    assert left_of(own_runtime) == []
