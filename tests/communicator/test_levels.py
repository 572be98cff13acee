"""Test two-level allreduces on real ranks: each pair of ranks acts as a host with shared memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.cluster import RankError
from labkit.schedules import ALLREDUCE
from labkit.schedules.interpreter import final_buffers

HOSTS = [[0, 1], [2, 3]]


def in_levels(communicator: Any, name: str, length: int, waits: bool = False) -> Any:
    """Return the rank's input, and its sums in a private buffer and in the pair's memory."""
    from labkit.communicator.executor import Executor, plan
    from labkit.communicator.shared_memory import SharedMemory
    from labkit.communicator.wire import MpiWire
    from labkit.schedules import ALLREDUCE

    pair = communicator.split(communicator.rank // 2)
    patience = communicator.wait_policy
    memory = SharedMemory(pair.wait_policy)
    ways = (patience.count_to, patience.wait_all, patience.sleep_until, None)
    executor = Executor(MpiWire(patience.comm), *ways)
    steps = plan(ALLREDUCE[name].between(4, HOSTS), communicator.rank, length)
    part = slice(*[(0, length // 2), (length // 2, length)][communicator.rank % 2])
    own = np.random.default_rng(communicator.rank).normal(size=length).astype(np.float32)
    sums = []
    for buffer in (own.copy(), memory.allocate(own.nbytes).view(own.dtype)):
        buffer[...] = own
        patience.name_call("a sum in two levels")
        pair.wait_policy.adopt_call(patience)
        if waits and communicator.rank == 3:
            raise KeyError("lost between levels")
        memory.allreduce_around(buffer, part, lambda flat: executor.run(steps, flat, patience.tag))
        sums.append(buffer.copy())
    memory.close()
    pair.close()
    return own, *sums


@pytest.mark.parametrize("name", [name for name, each in ALLREDUCE.items() if each.between])
@pytest.mark.parametrize("length", [0, 1, 4, 100_003])
def test_shared_memory_inside_adds_to_the_bits_of_the_schedule(
    cluster: Cluster, name: str, length: int
) -> None:
    found = cluster.call(in_levels, name, length)
    drawn = final_buffers(ALLREDUCE[name](4, hosts=HOSTS), np.array([own for own, *_ in found]))
    for rank, (_, *sums) in enumerate(found):
        assert [each.tobytes() for each in sums] == [drawn[rank].tobytes()] * 2


def test_whoever_waits_in_either_level_hears_of_a_rank_that_failed(cluster: Cluster) -> None:
    with pytest.raises(
        RankError, match=r"rank 3 failed: KeyError: .*lost between levels"
    ) as caught:
        cluster.call(in_levels, "two_level", 1000, True)
    assert caught.value.rank == 3
    assert "did not end" not in str(caught.value)


def test_whoever_hears_of_a_failure_when_others_have_gone_on_goes_with_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    def fail(communicator: Any, waits: Path, gone_on: Path) -> None:
        from labkit.communicator.shared_memory import SharedMemory

        def until(there: Path) -> None:
            while not there.exists():
                time.sleep(0.01)

        def pause(polls: int) -> None:
            waits.touch()
            until(gone_on)
            while True:
                patience.check_wait()

        def allocate(nbytes: int) -> Any:
            gone_on.touch()
            return memory_of_all(nbytes)

        pair = communicator.split(communicator.rank // 2)
        patience, memory = pair.wait_policy, SharedMemory(pair.wait_policy)
        memory_of_all = memory.allocate
        memory_of_all(8)
        if communicator.rank == 2:
            until(gone_on)
            raise KeyError("lost on another host")
        patience.name_call("a sum in memory that is made for it")
        if communicator.rank == 1:
            patience.pause = pause
        else:
            until(waits)
            memory.allocate = allocate
        memory.allreduce(np.ones(9))

    with pytest.raises(RankError, match=r"rank 2 failed: KeyError: .*another host'$"):
        cluster.call(fail, tmp_path / "waits", tmp_path / "gone on", ranks=3)


def test_whoever_comes_when_others_have_left_does_not_wait_for_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    def fail(communicator: Any, left: Path) -> None:
        from labkit.communicator.shared_memory import SharedMemory

        pair = communicator.split(communicator.rank // 2)
        memory = SharedMemory(pair.wait_policy)
        memory.allocate(8)
        if communicator.rank == 2:
            raise KeyError("lost on another host")
        while communicator.rank == 1 and not left.exists():
            time.sleep(0.01)
        pair.wait_policy.name_call("a sum in memory that is made for it")
        try:
            memory.allreduce(np.ones(9))
        finally:
            left.touch()

    with pytest.raises(RankError, match=r"rank 2 failed: KeyError: .*another host'$"):
        cluster.call(fail, tmp_path / "left", ranks=3)
