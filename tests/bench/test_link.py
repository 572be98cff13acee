"""Test the comparison of emulated and real links: tools, ranks, and cleanup."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import starmap

import numpy as np
import pytest
from click.testing import CliRunner

from labkit.bench.link import FLOWS, measure, measure_flows
from labkit.bench.linked_ranks import RankPair
from labkit.bench.timing import sweep
from labkit.cli.app import app
from labkit.common.errors import InvalidInput, LabkitError
from labkit.frameworks import namespaces
from labkit.schedules import ALLREDUCE


@pytest.fixture
def means():
    """Skip the test with labkit's error message if this machine cannot create a network link."""
    try:
        with namespaces.rate_limited_link(10**8):
            pass
    except LabkitError as error:
        pytest.skip(str(error))


@pytest.fixture
def pair():
    """Yield a function that runs code on two ranks (threads), joined by small socket buffers."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ends[0], ends[1], ThreadPoolExecutor(2) as threads:
        ranks = [RankPair(end, rank) for rank, end in enumerate(ends)]
        yield lambda function: list(threads.map(function, ranks))


def ours():
    """Return the network namespaces that labkit has created and not removed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("labkit-")]


def test_without_iproute2_the_command_says_in_one_line_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = CliRunner().invoke(app, ["bench", "link"])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "PATH lacks ip, tc; on Debian and Ubuntu, run apt-get install iproute2" in done.stderr


def test_without_root_the_command_says_in_one_line_that_it_needs_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["bench", "link"])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "needs root to create two network namespaces; start labkit with sudo" in done.stderr


def test_a_kernel_that_refuses_is_quoted_with_what_it_must_have(monkeypatch):
    refused = subprocess.CompletedProcess([], 2, stdout="", stderr="Operation not permitted\n")
    monkeypatch.setattr(namespaces, "require_tools", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    with (
        pytest.raises(LabkitError, match=r"netns add .*: Operation not permitted; .* sch_tbf"),
        namespaces.rate_limited_link(10**8),
    ):
        pass


@pytest.mark.parametrize("rate", ["fast", "100", "0Gb", "-1Gb", "1000", "1 Gparsec", ""])
def test_a_rate_that_is_none_is_refused_before_anything_is_made(rate):
    with pytest.raises(InvalidInput, match="such as 100Mb or 1Gb"):
        measure([rate])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithms": ["ring", "mpi"]}, r"algorithm='mpi' is not known; allowed: .*ring"),
        ({"sizes": []}, "give sizes of at least 4 bytes"),
        ({"sizes": [1024, 2]}, "give sizes of at least 4 bytes"),
        ({"repeats": 0}, "at least 1 repeat"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        measure(["100Mb"], **arguments)


def test_several_flows_have_a_queue_each_and_share_one_rate():
    told = namespaces.queues(10**8, 2)
    assert [line.split()[0] for line in told] == ["qdisc", "class", "class", "class"]
    assert "rate 100000000bit" in told[1]
    assert all("rate 50000000bit ceil 100000000bit" in line for line in told[2:])
    assert [f"1:{namespaces.class_of(n) & 0xFFFF:x}" in told[2 + n] for n in (0, 1)] == [True] * 2


@pytest.mark.parametrize(("rate", "frames"), [(10**7, 2), (10**8, 2), (10**9, 8)])
def test_at_most_a_few_frames_pass_at_line_speed(rate, frames):
    assert namespaces.burst(rate) == frames * 1514


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_two_ranks_on_a_stream_sum_as_the_schedule_says(pair, algorithm):
    """Both ranks first send more than the sockets can buffer; a blocking send would deadlock."""

    def summed(rank):
        buffer = np.arange(200_001, dtype=np.float32) * (1 + rank.rank)
        rank.allreduce(buffer, algorithm)
        return buffer

    expected = np.arange(200_001, dtype=np.float32) * 3
    assert all(np.array_equal(buffer, expected) for buffer in pair(summed))


def test_a_sweep_gives_both_ranks_the_time_of_the_slower_one(pair):
    cases = [("ring", 4096, 3), ("master_worker", 65536, 3)]
    first, second = pair(lambda rank: sweep(rank, cases))
    assert first == second
    assert all(starmap(lambda seconds, right: seconds > 0 and right, first))


def test_a_rank_whose_peer_has_gone_says_so():
    one, other = socket.socketpair()
    with one:
        other.close()
        with pytest.raises(LabkitError, match="the other rank closed the connection"):
            RankPair(one, 0).allreduce(np.zeros(2, np.float32), "master_worker")


@pytest.mark.slow
@pytest.mark.alone
def test_the_emulation_takes_as_long_as_a_real_link_of_20_megabits(means):
    rows = measure(["20Mb"], sizes=[2**18], repeats=3)
    assert [row["algorithm"] for row in rows] == ["ring", "master_worker"]
    for row in rows:
        assert row["correct"]
        assert row["payload"] == 1448
        assert row["min_ms"] >= 0.9 * row["closed_form_ms"]  # not faster than the link's rate
        assert row["error"] == pytest.approx(0, abs=0.15)  # within 3 % on an idle machine
    assert ours() == []


@pytest.mark.slow
@pytest.mark.alone
def test_two_flows_at_once_end_when_they_do_on_a_real_link(means):
    rows = measure_flows(["100Mb"], repeats=3)
    assert len(rows) == 2 * len(FLOWS)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        # Either of the two TCP flows may end first, but together they fill the link.
        last = max((first, second), key=lambda row: row["median_ms"])
        assert last["error"] == pytest.approx(0, abs=0.15)  # within 1 % on an idle machine
    assert ours() == []


@pytest.mark.slow
def test_control_c_ends_the_ranks_and_removes_the_link(means):
    code = (
        "from labkit.bench.linked_ranks import linked_ranks\n"
        "with linked_ranks(10**8, 'labkit.bench.linked_ranks') as ranks:\n"
        "    print(ranks.answer(), flush=True)\n"
        "    ranks.answer()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with child:
        assert "latency" in child.stdout.readline()
        own = [name for name in ours() if name.startswith(f"labkit-{child.pid}-")]
        assert len(own) == 2
        child.send_signal(signal.SIGINT)
        assert child.wait(120) != 0
    assert not set(own) & set(ours())
