"""Choose the allreduce algorithm, and the tables that send only changed rows, before training.

On a real network, labkit measures which algorithm is the fastest. For an emulated network, labkit
simulates the algorithms.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.common.files import usable_cores
from labkit.communicator import Communicator
from labkit.schedules import ALLREDUCE

MEASURED_CALLS = 7
# The constant `MIN_TABLE_BYTES` is a table size of 1 MiB. The sum of a 1 MiB table takes about as
# long as one call's overhead.
MIN_TABLE_BYTES = 2**20


@dataclass(frozen=True)
class Choice:
    """An allreduce algorithm, and the reason for the choice."""

    algorithm: str
    why: str

    @property
    def in_place(self) -> bool:
        """Whether ranks sum in shared memory, so that all ranks of a host can share one result."""
        return self.algorithm == "shared_memory"


def choose(communicator: Communicator, algorithm: str, nbytes: int, dense: bool = True) -> Choice:
    """Choose one allreduce algorithm for all ranks and for buckets of `nbytes` bytes (collective).

    "auto" measures the available algorithms in turn: one warm-up call, then `MEASURED_CALLS` calls
    of each. The slowest rank determines the time of a call. The algorithm with the smallest median
    time is chosen. On an emulated network, a simulation replaces the measurement. On a real
    network, compressed buckets use the collectives of the MPI library. The number of compressed
    bytes is unknown when labkit chooses the algorithm.

    Args:
        communicator: The Communicator of the ranks.
        algorithm: The requested algorithm, or "auto".
        nbytes: The number of bytes of the largest bucket.
        dense: Whether gradients are exchanged without compression.
    """
    if communicator.size == 1 and dense and algorithm in ("auto", "shared_memory"):
        return Choice("mpi", "a single rank has nothing to sum")
    if algorithm != "auto":
        return Choice(algorithm, "chosen by the experiment")
    if communicator.network is not None:
        # Each rank runs the simulation itself, because all ranks get the same result.
        return _simulated(communicator, nbytes)
    if not dense:
        return Choice(
            "mpi",
            "compressed payloads are small and of unequal size, which suits MPI's collectives",
        )
    candidates = ["mpi", "ring"]
    if communicator.on_one_host:
        candidates.append("shared_memory")
    else:
        candidates += [
            name for name, collective in ALLREDUCE.items() if collective.between is not None
        ]
    return _measured(communicator, candidates, nbytes)


def all_cores_compute(communicator: Communicator) -> bool:
    """Return whether the ranks' computation occupies all cores of the host (collective).

    If ranks of one host exchange data, a core copies the data. A core that copies data cannot
    compute at the same time. A real or emulated network transfers data without occupying a core.
    """
    if communicator.network is not None or not communicator.on_one_host:
        return False
    counts = communicator.allgather(
        (_threads(), usable_cores()), label="the exchange of the numbers of cores and threads"
    )
    return bool(sum(threads for threads, _ in counts) >= max(cores for _, cores in counts))


def _threads() -> int:
    """Return the number of TensorFlow's intra-op threads; by default, one per usable core."""
    import tensorflow as tf

    configured = tf.config.threading.get_intra_op_parallelism_threads()
    return configured or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0) or usable_cores()


def rows_are_worthwhile(communicator: Communicator, algorithm: str, nbytes: int) -> bool:
    """Return whether an embedding table is so large that ranks sum only its changed rows.

    On an emulated network, the time to sum the whole table decides. A large table takes at least
    twice as long to sum as 64 bytes. The choice cannot depend on the number of changed rows, which
    is unknown before a training step. If a step changes too many rows, the collective converts
    parts of the table to dense form.

    Args:
        communicator: The Communicator of the ranks.
        algorithm: The allreduce algorithm, or "auto".
        nbytes: The number of bytes of the whole table.
    """
    from labkit.simulate import simulate

    network = communicator.network
    if network is None or algorithm not in ("auto", *ALLREDUCE):
        return nbytes >= MIN_TABLE_BYTES
    if algorithm == "auto":
        algorithm = _simulated(communicator, nbytes).algorithm
    whole, nothing = (
        simulate(algorithm, communicator.size, count, network).seconds for count in (nbytes, 64)
    )
    return whole >= 2 * nothing


def _simulated(communicator: Communicator, nbytes: int) -> Choice:
    from labkit.simulate import simulate

    network = communicator.network
    assert network is not None
    seconds = {
        name: simulate(name, communicator.size, nbytes, network).seconds for name in ALLREDUCE
    }
    return fastest(seconds, f"simulated for {nbytes / 1e6:.3g} MB on {network}")


def _measured(communicator: Communicator, candidates: list[str], nbytes: int) -> Choice:
    clock, buffer = communicator.clock, communicator.allocate(max(nbytes // 4, 1))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(1 + MEASURED_CALLS):
        for name in candidates:
            communicator.barrier("the barrier before a timed allreduce that chooses the algorithm")
            start = clock.now()
            communicator.allreduce(buffer, name)
            times[name].append(clock.now() - start)
    slowest = {
        name: float(np.median(np.max(communicator.allgather(local[1:]), axis=0)))
        for name, local in times.items()
    }
    return fastest(
        slowest, f"the fastest when timed with {nbytes / 1e6:.3g} MB on {communicator.size} ranks"
    )


def fastest(seconds: Mapping[str, float], algorithm: str) -> Choice:
    """Return the fastest algorithm; among equally fast algorithms, the first one.

    Args:
        seconds: The time of each algorithm in seconds, by name.
        algorithm: A text for `Choice.why` that says how the times were obtained.
    """
    ranked = sorted(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in ranked[:3])
    return Choice(ranked[0], f"{algorithm}: {times}")


def by_priority(ready: Sequence[float], seconds: Sequence[float], rank: Sequence[int]) -> list[int]:
    """Return the bucket order of a link that, when free, always sends the most urgent ready bucket.

        ready    2  1  0     (the bucket of the last layer is ready first)
        seconds  1  3  1     -> [2, 1, 0]: when bucket 1 ends at 4, only bucket 0 remains
        ready    2  1  0
        seconds  1  1  3     -> [2, 0, 1]: when bucket 2 ends at 3, bucket 0 is the most urgent

    Args:
        ready: For each bucket, the time in seconds at which it is packed.
        seconds: For each bucket, the duration of its exchange in seconds.
        rank: For each bucket, its priority; the bucket with the lowest number is the most urgent.

    Source: Jayarajan et al.: Priority-based parameter propagation, 2019, arXiv 1905.03960; Peng et
    al.: A generic communication scheduler (ByteScheduler), 2019. Jayarajan et al. and Peng et al.
    decide the order while buckets wait. labkit fixes the order in advance from measured times, so
    that all ranks use the same order.
    """
    coming = sorted(range(len(ready)), key=lambda bucket: ready[bucket])
    waiting: list[tuple[int, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[0]])
        while coming and ready[coming[0]] <= now:
            bucket = coming.pop(0)
            heapq.heappush(waiting, (rank[bucket], bucket))
        _, bucket = heapq.heappop(waiting)
        order.append(bucket)
        now += seconds[bucket]
    return order


@dataclass(frozen=True)
class Schedule:
    """A rule that decides when the buckets of a training step are exchanged.

    All schedules compute the exact mean of the gradients; only the times of exchange differ.

    Attributes:
        name: The name of the schedule, as in `AllReduce(schedule=…)`.
        explanation: The description of the schedule and its source, in the form of a docstring.
        after: Whether the exchange begins after backpropagation and blocks the training step.
        turns: Whether ranks take turns in using the links that they share.
        into_next: Whether the exchange overlaps with the next step, which is possible only with the
            class `PriorityTraining`.
    """

    name: str
    explanation: str
    after: bool = False
    turns: bool = False
    into_next: bool = False


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "sequential",
            """Exchange all buckets after backpropagation.

    Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting Distributed Synchronous
    SGD, 2016, arXiv 1604.00981. Difference from the paper: ranks use no server and no backup
    workers. """,
            after=True,
        ),
        Schedule(
            "overlap",
            """Exchange each bucket when its gradients are ready, during backpropagation.

    If the ranks of a host compute on all its cores, a core that moves a bucket cannot compute.
    labkit then exchanges buckets after backpropagation, and the record notes that the step blocks.

    Source: H. Zhang et al., Poseidon, 2017, arXiv 1706.03292 (wait-free backpropagation); buckets:
    S. Li et al., PyTorch Distributed, 2020, arXiv 2006.15704.
    """,
        ),
        Schedule(
            "priority",
            """Exchange front layers first, so that the next step starts during the exchange.

    Large gradients are split into several buckets; each layer is updated before its next use.

    Source: A. Jayarajan et al., Priority-based Parameter Propagation, 2019, arXiv 1905.03960;
    Y. Peng et al., A Generic Communication Scheduler for Distributed DNN Training Acceleration,
    SOSP 2019. Difference from the papers: the order of buckets is fixed from measured times and the
    same on all ranks, not decided while buckets wait.
    """,
            into_next=True,
        ),
        Schedule(
            "staggered",
            """Exchange after backpropagation; ranks use a shared link one after another.

    Source: folklore; a shared link carries one message at a time without loss of bandwidth.
    """,
            after=True,
            turns=True,
        ),
    )
}
