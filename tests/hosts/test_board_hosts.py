"""Test one board over two hosts: both learn which rank fails, waits, asks for a stop or is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from labkit.communicator import launcher
from labkit.hosts import Testbed

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SCRIPT = [sys.executable, str(Path(__file__).with_name("sample_board.py"))]
HANG = 60.0  # seconds
Start: TypeAlias = "Callable[..., AbstractContextManager[subprocess.Popen[str]]]"
Run: TypeAlias = "Callable[..., subprocess.CompletedProcess[str]]"
Told = dict[str, dict[int, Any]]


def until_ready(process: subprocess.Popen[str]) -> Told:
    """Return what the ranks print until all of them are ready."""
    told: Told = {}
    assert process.stdout is not None
    while len(told.get("ready", {})) < 4:
        line = process.stdout.readline()
        assert line, "the ranks have ended"
        add(told, line)
    return told


def add(told: Told, line: str) -> None:
    what, rank, said = json.loads(line)
    told.setdefault(what, {})[rank] = said


@pytest.fixture(scope="module")
def told(bed: Testbed, mpistart: Start) -> Told:
    """Return what ranks print that end well although their link is down for 5 s."""
    with mpistart([*SCRIPT, "sound"]) as process:
        found = until_ready(process)
        bed.link_down("b")
        try:
            time.sleep(5)
        finally:
            bed.link_up()
        rest, errors = process.communicate(timeout=HANG)
        assert process.returncode == 0, errors
        for line in rest.splitlines():
            add(found, line)
    return found


def test_an_emulated_network_is_refused_on_real_hosts(told: Told) -> None:
    for text in told["network"].values():
        assert text.startswith("InvalidInput: network=")
        assert "but these ranks run on several hosts; remove network" in text


def test_all_ranks_stop_after_the_step_that_was_asked_for(told: Told) -> None:
    assert told["stops"] == {rank: [] for rank in range(4)}


def test_ranks_that_wait_in_different_calls_are_told_so(told: Told) -> None:
    for text in told["mismatch"].values():
        assert "Mismatch" in text
        assert "rank 0 waits in sum B (ring of float64[8])" in text
        assert "rank 1 waits in sum A (ring of float64[8])" in text
    assert set(told["mismatch"]) == {0, 2}


def test_a_link_that_is_down_for_five_seconds_is_survived(told: Told) -> None:
    assert told["outage"] == {1: "went on", 3: "went on"}


def test_a_failure_is_known_on_the_other_host(told: Told) -> None:
    assert set(told["failure"]) == {0, 1, 2}
    for text, seconds in told["failure"].values():
        assert text == "rank 3 failed: ValueError: planted"
        assert seconds < 2


def test_a_host_that_is_gone_is_named_and_every_rank_ends(bed: Testbed, mpistart: Start) -> None:
    folder = "/tmp/board-of-a-test"
    for host in bed.hosts:
        bed.run(host, ["mkdir", "-p", folder], check=True)
    with mpistart([*SCRIPT, "gone", folder]) as process:
        until_ready(process)
        bed.link_down("b")
        try:
            for host in bed.hosts:
                _wait_for_the_end(bed, host)
            for host, other, ranks in (("a", "b", "2, 3"), ("b", "a", "0, 1")):
                said = bed.run(host, ["sh", "-c", f"cat {folder}/*"], check=True).stdout
                for kind, text, seconds in map(json.loads, said.replace("][", "]\n[").splitlines()):
                    assert kind in ("HostSilent", "RankFailed"), text
                    assert f"host {other} with rank {ranks} has sent no status for 8 s" in text
                    assert seconds < 10
        finally:
            bed.link_up()
            for host in bed.hosts:
                bed.run(host, ["rm", "-r", folder], check=True)
        process.communicate(timeout=HANG)
        assert process.returncode != 0


def test_a_relay_that_dies_is_named_and_the_next_rank_of_its_host_takes_over(mpirun: Run) -> None:
    done = mpirun([*SCRIPT, "bereft"], options=launcher.ULFM_OPTIONS)
    told: Told = {}
    for line in done.stdout.splitlines():
        add(told, line)
    assert told["death"] == dict.fromkeys(
        (0, 1, 3), "RankDied: rank 2 failed: its process has ended"
    ), done.stderr
    assert set(told["missed"]) == {0, 1, 3}
    assert all(text.startswith("rank 2 is in") for text in told["missed"].values())


def _wait_for_the_end(bed: Testbed, host: str) -> None:
    limit = time.monotonic() + HANG
    while bed.run(host, ["pgrep", "-f", SCRIPT[-1]]).returncode == 0:
        assert time.monotonic() < limit
        time.sleep(0.2)
