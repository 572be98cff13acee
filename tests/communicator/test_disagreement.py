"""Test that ranks with different collective calls are told which rank called what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

Call = Callable[[Any], object]
BYTES = np.arange(9, dtype=np.uint8)
FEW = np.array([1, 3], "<i4")


def zeros(length: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(length, dtype)


def added(algorithm: str, what: str, length: int = 8, **more: Any) -> Call:
    return lambda c: c.allreduce(zeros(length, **more), algorithm, what)


def averaged(algorithm: str, what: str, **more: Any) -> Call:
    return lambda c: c.mean(zeros(8), 1.0, algorithm, what, **more)


def agreed(call: Call, *lengths: int) -> Call:
    """Return a call that runs after ranks have agreed on sums of these lengths."""

    def calls(communicator: Any) -> None:
        for length in lengths:
            communicator.allreduce(zeros(length), "shared_memory")
            communicator.allreduce(zeros(length), "ring")
        call(communicator)

    return calls


def in_memory(start: int, stop: int, then: str = "allreduce") -> Call:
    """Return a call that sums a slice of shared memory."""

    def call(communicator: Any) -> None:
        buffer = communicator.allocate(16)
        communicator.allreduce(buffer[start:stop], "shared_memory", then)

    return call


def in_common(common: bool) -> Call:
    def call(communicator: Any) -> None:
        from labkit.communicator import SeparateBuffers

        buffer, place = communicator.allocate(8), communicator.allocate(8, common=True)
        aside = SeparateBuffers(into=place) if common else SeparateBuffers()
        communicator.mean(buffer, 1.0, "shared_memory", separate=aside)

    return call


# The calls of two ranks, and the messages that both ranks get. The ranks meet in each of these
# calls, so they can continue afterwards.
MET: dict[str, tuple[Call, Call, str, str]] = {
    "shared memory, for another purpose": (
        *(added("shared_memory", "sum A"), added("shared_memory", "sum B")),
        *("sum A (shared_memory of float32[8])", "sum B (shared_memory of float32[8])"),
    ),
    "shared memory, of another length that is known": (
        *(
            agreed(added("shared_memory", "s", 8), 8, 9),
            agreed(added("shared_memory", "s", 9), 8, 9),
        ),
        *("s (shared_memory of float32[8])", "s (shared_memory of float32[9])"),
    ),
    "shared memory, of another part": (
        *(in_memory(0, 8), in_memory(8, 16)),
        *("from byte 0 of buffer", "from byte 32 of buffer"),
    ),
    "shared memory, of memory of its own": (
        *(in_memory(0, 8), lambda c: (c.allocate(16), added("shared_memory", "allreduce")(c))),
        *("from byte 0 of buffer", "in its staging buffer"),
    ),
    "shared memory, into common memory": (
        *(in_common(True), in_common(False)),
        *("into common memory", "from byte 0 of buffer"),
    ),
    "a mean in shared memory": (
        *(added("shared_memory", "s"), averaged("shared_memory", "s")),
        *("s (shared_memory of float32[8])", "s (shared_memory mean of float32[8])"),
    ),
    "the library, for another purpose": (
        *(added("mpi", "sum A"), added("mpi", "sum B")),
        *("sum A (mpi of float32[8])", "sum B (mpi of float32[8])"),
    ),
    "a mean by the library": (
        *(added("mpi", "s"), averaged("mpi", "s", total=2.0)),
        *("s (mpi of float32[8])", "s (mpi mean of float32[8])"),
    ),
    "a sum of another dtype": (
        *(added("mpi", "s", dtype="int32"), added("mpi", "s", dtype="int64")),
        *("mpi of <i4[8]", "mpi of <i8[8]"),
    ),
    "weights": (
        *(lambda c: c.total(1.0, "a"), lambda c: c.total(1.0, "b")),
        *("the weights of a", "the weights of b"),
    ),
    "weights and a barrier": (
        *(lambda c: c.total(1.0, "a"), lambda c: c.barrier("b")),
        *("the weights of a", "waits in b"),
    ),
    "broadcast of another length": (
        *(lambda c: c.broadcast(zeros(10)), lambda c: c.broadcast(zeros(11))),
        *("float32[10] from rank 0", "float32[11] from rank 0"),
    ),
    "broadcast of another dtype": (
        *(lambda c: c.broadcast(zeros(8)), lambda c: c.broadcast(zeros(8, "int32"))),
        *("float32[8] from rank 0", "int32[8] from rank 0"),
    ),
    "broadcast from another rank": (
        *(lambda c: c.broadcast(zeros(8), 0), lambda c: c.broadcast(zeros(8), 1)),
        *("float32[8] from rank 0", "float32[8] from rank 1"),
    ),
    "share from another rank": (
        *(lambda c: c.broadcast_object("a", 0), lambda c: c.broadcast_object("b", 1)),
        *("share from rank 0", "share from rank 1"),
    ),
    "share and allgather of one name": (
        *(lambda c: c.broadcast_object("a", label="it"), lambda c: c.allgather("b", label="it")),
        *("it (share from rank 0)", "it (allgather)"),
    ),
    "scatter from another rank": (
        *(lambda c: c.scatter("ab", 0), lambda c: c.scatter("ab", 1)),
        *("scatter from rank 0", "scatter from rank 1"),
    ),
    "tally of another shape": (
        *(lambda c: c.allreduce_small(zeros(3)), lambda c: c.allreduce_small(zeros(1))),
        *("tally of float32[3]", "tally of float32[1]"),
    ),
    "split and allgather": (
        *(lambda c: c.split(0), lambda c: c.allgather(0, "split")),
        *("rank 0 waits in split", "split (allgather)"),
    ),
    "a window and memory": (
        *(lambda c: c.window(8), lambda c: c.allocate(8)),
        *(
            "the barrier before the allocation of an MPI window",
            "the allocation of shared memory, float32[8]",
        ),
    ),
    "memory of another length": (
        *(lambda c: c.allocate(8), lambda c: c.allocate(9)),
        *("shared memory, float32[8]", "shared memory, float32[9]"),
    ),
    "payloads, for another purpose": (
        *(lambda c: c.gather_bytes(BYTES, label="a"), lambda c: c.gather_bytes(BYTES, label="b")),
        *("a (mpi gather)", "b (mpi gather)"),
    ),
    "sparse vectors of another length": (
        *(lambda c: c.sparse_sum(FEW, zeros(2), 9), lambda c: c.sparse_sum(FEW, zeros(2), 10)),
        *("sparse float32[9]", "sparse float32[10]"),
    ),
    "rows of another width": (
        *(
            lambda c: c.sum_rows(FEW, np.ones((2, 3)), 9),
            lambda c: c.sum_rows(FEW, np.ones((2, 4)), 9),
        ),
        *("sparse float64[9, 3]", "sparse float64[9, 4]"),
    ),
}

# These calls have no handshake: a message carries the call in its tag, so no rank receives it.
MISSED: dict[str, tuple[Call, Call, str, str]] = {
    "a schedule, for another purpose": (
        *(agreed(added("ring", "sum A"), 8), agreed(added("ring", "sum B"), 8)),
        *("sum A (ring of float32[8])", "sum B (ring of float32[8])"),
    ),
    "a schedule, of a length that is new to one": (
        *(agreed(added("ring", "s", 8), 8), agreed(added("ring", "s", 9), 8)),
        *(
            "s (ring of float32[8])",
            "the allreduce argument check: s (ring of float32[9])",
        ),
    ),
    "a mean by a schedule": (
        *(agreed(averaged("ring", "s", total=2.0), 8), agreed(added("ring", "s"), 8)),
        *("s (ring mean of float32[8])", "s (ring of float32[8])"),
    ),
    "payloads by a schedule, for another purpose": (
        lambda c: c.gather_bytes(BYTES, "ring", "a"),
        lambda c: c.gather_bytes(BYTES, "ring", "b"),
        *("a (ring gather)", "b (ring gather)"),
    ),
    "sparse vectors of another length by a schedule": (
        lambda c: c.sparse_sum(FEW, zeros(2), 9, "butterfly"),
        lambda c: c.sparse_sum(FEW, zeros(2), 10, "butterfly"),
        *("butterfly of sparse float32[9]", "butterfly of sparse float32[10]"),
    ),
    "rows of another dtype by a schedule": (
        lambda c: c.sum_rows(FEW, np.ones((2, 3)), 9, "ring"),
        lambda c: c.sum_rows(FEW, np.ones((2, 3), "float32"), 9, "ring"),
        *("ring of sparse float64[9, 3]", "ring of sparse float32[9, 3]"),
    ),
}


def told(communicator: Any) -> dict[str, str]:
    """Return the messages that this rank of a pair gets in each case; two pairs share the cases."""
    from labkit.communicator import Mismatch, RankFailed

    number, pair = communicator.rank // 2, communicator.split(communicator.rank // 2)
    found = {}

    def hear(case: str, call: Call, ranks: Any) -> None:
        try:
            call(ranks)
        except (Mismatch, RankFailed) as error:
            found[case] = str(error)
        else:
            found[case] = "nothing"

    if number == 0:
        for case, calls in MET.items():
            hear(case, calls[pair.rank], pair)
        pair.barrier("the rest")  # the communicator can still be used
    for case in list(MISSED)[number::2]:
        hear(case, MISSED[case][pair.rank], pair.split(0))  # the group is unusable afterwards
    return found


@pytest.fixture(scope="module")
def heard(cluster: Cluster) -> list[dict[str, str]]:
    """Return the messages that all ranks get, for all cases."""
    return cluster.call(told)


@pytest.mark.parametrize("case", [*MET, *MISSED])
def test_each_rank_is_told_who_disagrees_about_what(heard: list[dict[str, str]], case: str) -> None:
    *_, first, second = (MET | MISSED)[case]
    texts = [found[case] for found in heard if case in found]
    assert len(texts) == 2
    for text in texts:
        own, other = text.split("rank 1", 1) if "rank 1 failed" not in text else (text, text)
        assert "rank 0" in own
        assert first in own
        assert second in other


def test_a_scatter_of_too_few_parts_is_refused_and_nobody_hangs(cluster: Cluster) -> None:
    from labkit.common.errors import InvalidInput

    def scatter(communicator: Any) -> None:
        communicator.scatter(["a"] if communicator.rank == 0 else None)

    with pytest.raises(
        InvalidInput, match="scatter received 1 parts; give one part for each of the 2 ranks"
    ):
        cluster.call(scatter, ranks=2)


def test_a_rank_that_computes_behind_a_broadcast_is_not_taken_for_one_that_waits(
    cluster: Cluster,
) -> None:
    def late(communicator: Any) -> float:
        import time

        patience = communicator.wait_policy
        patience._outlives = True  # a fault-tolerant communicator does not use blocking calls
        communicator.broadcast(np.zeros(4))
        if communicator.rank == 0:
            time.sleep(communicator.board.deadlocked_after + 1)
        return float(sum(communicator.allgather(1.0)))

    assert cluster.call(late, ranks=2) == [2.0, 2.0]
