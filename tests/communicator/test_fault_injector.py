"""Test injected faults: faults of processes are real, and checksums detect message faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Fault
from labkit.cluster import RankError
from labkit.communicator import Injector

VICTIM = """
from labkit.communicator import Injector
from labkit.network import Fault
injector = Injector([Fault({kind!r}, rank=0, step=1), Fault("kill", rank=1, step=0)], 0)
injector.begin_step(0)
print("lives", flush=True)
injector.begin_step(1)
print("goes on", flush=True)
"""


def test_who_is_killed_is_gone_when_its_step_begins() -> None:
    run = [sys.executable, "-c", VICTIM.format(kind="kill")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("lives\n", -signal.SIGKILL)


def test_who_pauses_is_stopped_by_the_system_and_woken() -> None:
    run = [sys.executable, "-c", VICTIM.format(kind="pause")]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert child.communicate(timeout=60)[0] == "lives\ngoes on\n"
        assert child.returncode == 0


def test_a_gradient_is_hit_at_its_layer_in_its_step_only() -> None:
    injector = Injector([Fault("nan", rank=0, step=1, layer="b", offset=1)], 0)
    paths, given = ["m/b/bias", "m/b/kernel", "m/a/kernel"], [np.zeros(3)] * 3
    for step in range(3):
        injector.begin_step(step)
        bad = [np.isnan(gradient).tolist() for gradient in injector.gradients(paths, given)]
        assert sum(map(sum, bad)) == (step == 1)
        assert bad[0][1] == (step == 1)


def test_slow_counts_while_it_lasts() -> None:
    injector = Injector([Fault("slow", rank=0, step=1, factor=4, steps=2)], 0)
    factors = []
    for step in range(4):
        injector.begin_step(step)
        factors.append(injector.factor)
    assert factors == [1.0, 4.0, 4.0, 1.0]


def exchange(communicator: Any, kind: str, by: str, checks: bool) -> float:
    """Run two steps; a fault damages rank 1's second message in the second step."""
    communicator.rules.checks = checks
    fault = Fault(kind, rank=1, step=1, message=1, offset=3, bit=7)
    communicator.inject_faults(Injector([fault], communicator.rank))
    total = np.zeros(0)
    mailbox = communicator.mailbox() if by == "letter" else None
    for step in range(2):
        communicator.rules.injector.begin_step(step)
        total = np.full(9, 1.0 + communicator.rank, np.float32)
        if mailbox is None:
            communicator.allreduce(total, "ring")
        elif communicator.rank == 1:
            for _ in range(2):
                mailbox.post((1, 0), np.zeros(1), total.view(np.uint8))
        found = 0
        communicator.wait_policy.name_call("letters of a test", collective=False)
        while mailbox is not None and communicator.rank == 0 and found < 2:
            letters = mailbox.collect()
            found += len(letters)
            total = letters[-1].values.view(np.float32) if letters else total
        while mailbox is not None and not mailbox.idle:
            pass
        communicator.barrier("the end of a step")
    return float(total.min())


@pytest.mark.parametrize("by", ["round", "letter"])
def test_a_flipped_bit_is_found_by_checksum_and_passes_unseen_without(
    cluster: Cluster, by: str
) -> None:
    assert min(cluster.call(exchange, "corrupt", by, False, ranks=2)) < 0  # it flips the sign bit
    with pytest.raises(RankError, match="from rank 1 to rank 0 in") as error:
        cluster.call(exchange, "corrupt", by, True, ranks=2)
    assert "its checksum is wrong" in str(error.value)
    if by == "round":
        assert "ring of float32[9]), round 2" in str(error.value)


def test_a_lost_message_is_found_by_the_checksum_of_the_one_behind_it(cluster: Cluster) -> None:
    def lose(communicator: Any) -> None:
        communicator.rules.checks = True
        communicator.inject_faults(Injector([Fault("drop", rank=1, step=0)], communicator.rank))
        communicator.rules.injector.begin_step(0)
        communicator.allreduce(np.ones(8, np.float32), "ring")

    with pytest.raises(RankError, match="round 1 differs from what was sent") as error:
        cluster.call(lose, ranks=2)
    assert "an earlier message was lost" in str(error.value)


@pytest.mark.slow
def test_a_lost_message_that_none_comes_behind_has_a_name_when_the_wait_is_too_long() -> None:
    def lose(communicator: Any) -> None:
        communicator.rules.checks = True
        communicator.inject_faults(
            Injector([Fault("drop", rank=1, step=0, message=1)], communicator.rank)
        )
        communicator.rules.injector.begin_step(0)
        communicator.allreduce(np.ones(8, np.float32), "ring")

    with Cluster(workers=2, timeout=4) as short, pytest.raises(RankError) as error:
        short.call(lose)
    assert "these messages were sent but not received: from rank 1 to rank 0" in str(error.value)
