"""Test the executor of allreduces on real MPI ranks: sums, bits, traffic and disagreement."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit.cluster import RankError
from labkit.communicator import launcher

SCRIPT = Path(__file__).with_name("ranks.py")


def under_mpiexec(ranks, *arguments):
    command = [*launcher.mpiexec(ranks), sys.executable, str(SCRIPT), *arguments]
    environment = {**__import__("os").environ, **launcher.environment()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_every_algorithm_sums_every_type_and_length_to_the_same_bits_on_all_ranks():
    assert under_mpiexec(5, "sums", "1,2,3,4,5") == ["done"]


@pytest.mark.slow
def test_traffic_equals_the_formula_of_every_algorithm_on_1_to_17_ranks():
    assert under_mpiexec(17, "counts", ",".join(map(str, range(1, 18)))) == ["done"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"length": 9}, "rank 2: ring of <f4[9]"),
        ({"dtype": "float64"}, "rank 2: ring of <f8[8]"),
        ({"algorithm": "tree"}, "rank 2: tree of <f4[8]"),
    ],
)
def test_ranks_that_differ_are_told_who_differs_in_what(cluster, change, named):
    def differ(communicator, change):
        call = {"length": 8, "dtype": "float32", "algorithm": "ring"}
        call |= change if communicator.rank == 2 else {}
        buffer = np.ones(call["length"], call["dtype"])
        communicator.allreduce(buffer, call["algorithm"])

    with pytest.raises(
        RankError, match="ranks called an allreduce with different algorithms"
    ) as error:
        cluster.call(differ, change)
    assert named in str(error.value)


def test_a_later_divergence_is_named(cluster):
    def diverge(communicator):
        one, other = np.ones(8, np.float32), np.ones(9, np.float32)
        communicator.allreduce(one, "ring")
        communicator.allreduce(other, "ring")  # the ranks have planned and agreed on both lengths
        communicator.allreduce(other if communicator.rank == 2 else one, "ring")

    with pytest.raises(RankError) as error:
        cluster.call(diverge)
    assert "ranks wait for each other in different calls" in str(error.value)
    assert "float32[9]" in str(error.value)
    assert "float32[8]" in str(error.value)


def test_send_and_recv_meet_by_tag_and_are_metered(cluster):
    def swap(communicator):
        own = np.full(1000, communicator.rank, np.int32)
        other = np.zeros(1000, np.int32)
        partner = communicator.rank ^ 1
        first, second = (
            (communicator.send, communicator.recv)
            if communicator.rank < partner
            else (communicator.recv, communicator.send)
        )
        first(own if first == communicator.send else other, partner, tag=3)
        second(own if second == communicator.send else other, partner, tag=3)
        return int(other[0]), communicator.traffic.messages, communicator.traffic.wire_bytes

    assert cluster.call(swap) == [(rank ^ 1, 1, 4000) for rank in range(4)]


def test_windows_put_and_get_without_the_owners_help(cluster):
    def around(communicator):
        window = communicator.window(16)
        communicator.barrier()
        following = (communicator.rank + 1) % communicator.size
        window.put(np.array([communicator.rank + 10], np.int64), following, offset=8)
        communicator.barrier()
        got = np.zeros(1, np.int64)
        window.get(got, following, offset=8)
        own = int(window.memory[8:].view(np.int64)[0])
        communicator.barrier()
        window.close()
        return own, int(got[0])

    assert cluster.call(around) == [((rank - 1) % 4 + 10, rank + 10) for rank in range(4)]


def test_a_buffer_in_shared_memory_is_reduced_where_it_is(cluster):
    def reduce(communicator):
        buffer = communicator.allocate(1001, np.float64)
        address = buffer.ctypes.data
        buffer[...] = communicator.rank + 1
        communicator.allreduce(buffer[1:], "shared_memory")  # a slice of shared memory, too
        return float(buffer[0]), float(buffer[1]), float(buffer[-1]), address % 64

    assert cluster.call(reduce) == [(rank + 1.0, 10.0, 10.0, 0) for rank in range(4)]


def test_a_mean_is_written_once_for_all_ranks(cluster):
    def mean(communicator):
        from labkit.communicator import SeparateBuffers

        own = communicator.allocate(1001, np.float64)
        common = communicator.allocate(1001, np.float64, common=True)
        own[...] = communicator.rank + 1
        weight = [0.0, 1.0, 1.0, 2.0][communicator.rank]
        communicator.mean(
            own[1:], weight, "shared_memory", separate=SeparateBuffers(into=common[1:])
        )
        seen = [float(common[0]), float(common[1]), float(common[-1])]
        communicator.barrier()
        part = communicator.local_part(1001)
        elsewhere = np.full(part.stop - part.start, 10.0)
        aside = SeparateBuffers([(part.start, elsewhere)], common)
        communicator.mean(own, 1.0, "shared_memory", separate=aside)
        middle = float(common[500])  # index 500 belongs to rank 1 or to rank 2
        return seen, middle, float(own.min()), float(own.max()), common.ctypes.data % 64

    whole = (0 * 1 + 1 * 2 + 1 * 3 + 2 * 4) / 4
    found = cluster.call(mean)
    assert [each[0] for each in found] == [[0.0, whole, whole]] * 4
    assert {each[1] for each in found} in ({(1 + 10 + 3 + 4) / 4}, {(1 + 2 + 10 + 4) / 4})
    assert [each[2:] for each in found] == [(rank + 1.0, rank + 1.0, 0) for rank in range(4)]
