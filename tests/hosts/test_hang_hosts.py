"""Test a hang on another host: the notebook learns where, and that the host still answers."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import labkit as lk
from labkit.cluster.calls import RankError
from labkit.communicator import Communicator

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.usefixtures("bed", "shared_folder")]


def get_lost(communicator: Communicator) -> None:
    buffer = np.ones(8)
    communicator.allreduce(buffer, "ring", "the exchange")
    if communicator.rank == 3:
        time.sleep(600)
    communicator.allreduce(buffer, "ring", "the exchange")


def stop(communicator: Communicator) -> None:
    communicator.barrier("the start")
    if communicator.rank == 2:  # rank 2 carries its host's board to other hosts
        os.kill(os.getpid(), signal.SIGSTOP)
    communicator.barrier("the end")


def test_each_rank_is_told_with_the_line_in_which_it_stands() -> None:
    with lk.Cluster(hosts=["a:2", "b:2"], timeout=8) as cluster:
        with pytest.raises(
            RankError, match="rank 3 did not reach the call in which other ranks wait: WaitTooLong"
        ) as caught:
            cluster.call(get_lost)
        assert cluster.call(lambda communicator: communicator.rank) == [0, 1, 2, 3]
    text = str(caught.value)
    lost, *others = text.split("; rank ")[:4]
    assert "rank 3 is in work after the exchange" in lost
    assert "tests/hosts" not in text
    assert "get_lost" in lost
    assert len(others) == 3
    for other in others:
        assert " waits there too, round " in other
        assert " get_lost)" in other


def test_a_rank_that_is_stopped_is_told_from_a_host_that_is_gone() -> None:
    with lk.Cluster(hosts=["a:2", "b:2"]) as cluster:
        with pytest.raises(RankError) as caught:
            cluster.call(stop)
        assert caught.value.rank == 2
        text = str(caught.value)
        assert "host b with rank 2, 3 has sent no status" in text
        assert "but the host answers, and the process of rank 2 is alive and blocked" in text
