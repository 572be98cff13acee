"""Test communicators: sums, messages, groups, and the errors of ranks that wait in vain."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.cluster import RankError

SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_the_sum_is_right_for_every_dtype_and_length(cluster: Cluster, dtype: str) -> None:
    lengths = [0, 1, 7, 1001]

    def add(communicator: Any) -> list[np.ndarray]:
        buffers = [(np.arange(n) % 13 + communicator.rank).astype(dtype) for n in lengths]
        for buffer in buffers:
            communicator.allreduce(buffer)
        return buffers

    for result in cluster.call(add):
        for length, buffer in zip(lengths, result, strict=True):
            assert buffer.dtype == dtype
            np.testing.assert_array_equal(buffer, 4 * (np.arange(length) % 13) + 6)


def test_half_floats_are_summed_in_single_and_rounded_once(cluster: Cluster) -> None:
    def add(communicator: Any) -> float:
        # In float16, 2048 + 1 rounds to 2048; in float32, 2048 + 1 + 1 + 1 is exact and then rounds
        # to 2052 in float16.
        buffer = np.array([2048.0 if communicator.rank == 0 else 1.0], np.float16)
        communicator.allreduce(buffer)
        return float(buffer[0])

    assert cluster.call(add) == [2052.0] * 4


def test_the_sum_is_taken_in_place_and_has_the_same_bits_on_all_ranks(cluster: Cluster) -> None:
    def add(communicator: Any) -> tuple[bytes, bool]:
        own = np.random.default_rng(communicator.rank).standard_normal(4097)
        view = own[:]
        communicator.allreduce(view)
        return own.tobytes(), view.base is own

    results = cluster.call(add)
    wanted = sum(np.random.default_rng(rank).standard_normal(4097) for rank in range(4))
    np.testing.assert_allclose(np.frombuffer(results[0][0]), wanted, rtol=1e-12)
    assert results == [results[0]] * 4


def test_an_unknown_algorithm_is_refused_with_those_that_are_known(cluster: Cluster) -> None:
    def add(communicator: Any) -> None:
        communicator.allreduce(np.zeros(3), algorithm="gossip")

    with pytest.raises(RankError, match=r"'gossip'.*allowed: .*mpi"):
        cluster.call(add, ranks=2)


@pytest.mark.parametrize("root", [0, 2])
def test_objects_and_buffers_reach_the_ranks_they_are_meant_for(
    cluster: Cluster, root: int
) -> None:
    def talk(communicator: Any) -> dict[str, Any]:
        rank, at_root = communicator.rank, communicator.rank == root
        matrix = np.full((3, 5), rank, np.int16)
        communicator.broadcast(matrix, root)
        scalar = np.array(float(rank))
        communicator.broadcast(scalar, root)
        empty = np.zeros((0, 4), np.float32)
        communicator.broadcast(empty, root)
        flags = np.array([at_root, not at_root])
        communicator.broadcast(flags, root)
        return {
            "broadcast": (matrix.tolist(), float(scalar), empty.shape, flags.tolist()),
            "share": communicator.broadcast_object({"from": rank} if at_root else None, root),
            "allgather": communicator.allgather(str(rank)),
            "scatter": communicator.scatter(
                [f"to {r}" for r in range(4)] if at_root else None, root
            ),
        }

    for rank, heard in enumerate(cluster.call(talk)):
        assert heard["broadcast"] == ([[root] * 5] * 3, root, (0, 4), [True, False])
        assert heard["share"] == {"from": root}
        assert heard["allgather"] == ["0", "1", "2", "3"]
        assert heard["scatter"] == f"to {rank}"


@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_the_first_ranks_makes_a_world(cluster: Cluster, size: int) -> None:
    def describe(communicator: Any) -> tuple[int, int, int]:
        communicator.barrier()
        return communicator.rank, communicator.size, communicator.local_rank

    assert cluster.call(describe, ranks=size) == [(rank, size, rank) for rank in range(size)]


def test_split_makes_groups_in_the_order_of_ranks_or_of_the_key(cluster: Cluster) -> None:
    def split(communicator: Any) -> list[Any]:
        pairs = communicator.split(communicator.rank % 2)
        backwards = communicator.split(0, key=-communicator.rank)
        result = [pairs.allgather(communicator.rank), backwards.rank]
        total = np.array([communicator.rank])
        pairs.allreduce(total)
        for part in (pairs, backwards):
            part.close()
        return [*result, int(total[0])]

    assert cluster.call(split) == [
        [[0, 2], 3, 2],
        [[1, 3], 2, 4],
        [[0, 2], 1, 2],
        [[1, 3], 0, 4],
    ]


def test_the_meter_counts_what_a_rank_hands_over_and_how_long_it_waits(cluster: Cluster) -> None:
    def count(communicator: Any) -> list[Any]:
        buffer = np.zeros(1000, np.float32)
        communicator.barrier()
        before = communicator.traffic.copy()
        if communicator.rank == 1:
            time.sleep(2.0)
        communicator.allreduce(buffer)
        added = communicator.traffic.since(before)
        before = communicator.traffic.copy()
        communicator.broadcast(buffer, root=2)
        handed = communicator.traffic.since(before)
        return [
            (added.messages, added.payload_bytes, added.wire_bytes),
            added.wait_seconds,
            (handed.payload_bytes, handed.wire_bytes),
        ]

    for rank, (added, waited, handed) in enumerate(cluster.call(count)):
        assert added == (1, 4000, 2 * 3 * 4000 // 4)
        assert (waited > 1.0) == (rank != 1)
        assert handed == ((4000, 4000) if rank == 2 else (0, 0))


def test_a_world_of_one_sends_nothing(cluster: Cluster) -> None:
    def count(communicator: Any) -> tuple[int, int]:
        communicator.allreduce(np.ones(10))
        communicator.broadcast(np.ones(10))
        return communicator.traffic.messages, communicator.traffic.payload_bytes

    assert cluster.call(count, ranks=1) == [(0, 0)]


def test_a_rank_that_fails_is_named_by_those_that_wait_and_the_engines_stay_usable(
    cluster: Cluster,
) -> None:
    def fail(communicator: Any) -> None:
        communicator.barrier()
        if communicator.rank == 2:
            raise KeyError("lost in the woods")
        communicator.allreduce(np.ones(3), label="a long sum")

    before = cluster.call(engine)
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 failed: KeyError: .*lost in the woods") as caught:
        cluster.call(fail)
    assert caught.value.rank == 2
    assert "lost in the woods" in caught.value.remote
    assert time.monotonic() - begin < cluster.timeout / 2
    assert cluster.call(engine) == before


def engine(communicator: Any) -> int:
    import os

    communicator.barrier()
    return os.getpid()


def test_the_waiting_ranks_raise_rank_failed_with_the_cause(cluster: Cluster) -> None:
    def fail(communicator: Any) -> str:
        from labkit.communicator import RankFailed

        communicator = communicator.split(0)  # unusable afterwards, unlike the call's communicator
        if communicator.rank == 1:
            communicator.barrier()
            communicator.board.fail("ValueError: no more ink")
            return "failed"
        try:
            communicator.barrier()  # this call may already raise the failure
            communicator.broadcast_object(None, label="the shared letter")
        except RankFailed as error:
            remembered = communicator.wait_policy.first_error is error
            return f"{error.rank}, {remembered}: {error}"
        return "went on"

    heard = cluster.call(fail, ranks=3)
    assert heard == ["1, True: rank 1 failed: ValueError: no more ink", "failed", heard[0]]


def test_a_rank_that_does_not_come_is_named_with_the_call_it_is_in(
    cluster: Cluster, tmp_path: Path
) -> None:
    def dawdle(communicator: Any, folder: Path) -> str:
        from labkit.communicator import WaitTooLong

        communicator = communicator.split(0)  # unusable afterwards, unlike the call's communicator
        communicator.barrier("the start of the race")
        communicator.wait_policy.timeout = 2.0
        if communicator.rank == 1:
            while len(list(folder.glob("told*"))) < 2:
                time.sleep(0.05)
            return ""
        try:
            communicator.allgather(0, label="the finish")
        except WaitTooLong as error:
            (folder / f"told{communicator.rank}").touch()
            return str(error)
        return "all came"

    first, _, third = cluster.call(dawdle, tmp_path, ranks=3)
    assert "rank 0 has waited 2 s in the finish" in first
    assert "rank 1 is in work after the start of the race for " in first
    assert "rank 2 is in" not in first
    assert "timeout=" in first
    assert "rank 2 has waited" in third


def test_a_wait_that_is_too_long_ends_the_call_and_the_engines_stay_usable(
    cluster: Cluster, tmp_path: Path
) -> None:
    def dawdle(communicator: Any, told: Path) -> None:
        communicator.barrier("the start of the race")
        if communicator.rank == 0:
            while not told.exists():
                time.sleep(0.05)
        else:
            communicator.wait_policy.timeout = 0.4
        try:
            communicator.barrier("the finish")
        finally:
            told.touch()

    before = cluster.call(engine)
    with pytest.raises(RankError, match=r"WaitTooLong: rank 1 has waited .* in the finish: rank 0"):
        cluster.call(dawdle, tmp_path / "told", ranks=2)
    assert cluster.call(engine) == before


def test_ranks_that_meet_in_different_calls_are_told_so(cluster: Cluster) -> None:
    def talk(communicator: Any) -> None:
        if communicator.rank == 0:
            communicator.allreduce(np.zeros(3), label="the exchange of gradients")
        else:
            communicator.allreduce(np.zeros(9), label="metrics")

    with pytest.raises(
        RankError, match=r"ranks called.*different.*rank 0: .*\[3\]; rank 1: .*\[9\]"
    ):
        cluster.call(talk, ranks=2)
