"""What ranks settle before the first step: the algorithm, and what may travel as rows.

What is fastest here: measured on real ranks, computed on an emulated network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from labkit.common.paths import usable_cores
from labkit.communicator import Communicator
from labkit.schedules import ALLREDUCE

CALLS = 7
LEAST = 2**20  # bytes, of which a sum on one host takes as long as a call


@dataclass(frozen=True)
class Choice:
    """An algorithm, and why it was chosen."""

    algorithm: str
    why: str

    @property
    def in_place(self) -> bool:
        """Whether ranks add up in memory that they share, so that one copy serves all of them."""
        return self.algorithm == "shared_memory"


def choose(communicator: Communicator, algorithm: str, nbytes: int, dense: bool = True) -> Choice:
    """The algorithm to sum buckets of so many bytes with (collective, the same on all ranks).

    "auto" tries what this machine offers, `CALLS` times each after a warm-up, interleaved, and
    takes the least median of the slowest rank; on an emulated network the simulator decides. Of
    compressed buckets (not `dense`) nobody knows the bytes beforehand: without an emulated network
    the library's own collectives carry them.
    """
    if communicator.size == 1 and dense and algorithm in ("auto", "shared_memory"):
        return Choice("mpi", "one rank alone has nothing to add up")
    if algorithm != "auto":
        return Choice(algorithm, "as asked for")
    if communicator.network is not None:
        return _simulated(communicator, nbytes)  # the same arithmetic on all ranks
    if not dense:
        return Choice("mpi", "payloads are small and of unequal size: the library's collectives")
    candidates = ["mpi", "ring"]
    if communicator.on_one_host:
        candidates.append("shared_memory")
    else:
        candidates += [
            name for name, collective in ALLREDUCE.items() if collective.between is not None
        ]
    return _measured(communicator, candidates, nbytes)


def no_core_is_free(communicator: Communicator) -> bool:
    """Whether ranks that compute take up their host (collective, the same on all ranks).

    What moves bytes between ranks of one host is a core, which then computes nothing. A line, also
    an emulated one, moves them by itself.
    """
    if communicator.network is not None or not communicator.on_one_host:
        return False
    told = communicator.allgather((_threads(), usable_cores()), what="the cores of the host")
    return bool(sum(threads for threads, _ in told) >= max(cores for _, cores in told))


def _threads() -> int:
    """In which this rank computes; of TensorFlow, none named are all there can be."""
    import tensorflow as tf

    named = tf.config.threading.get_intra_op_parallelism_threads()
    return named or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0) or usable_cores()


def rows_pay(communicator: Communicator, algorithm: str, nbytes: int) -> bool:
    """Whether a table of so many bytes is worth a call of its own, in which rows travel alone.

    They do so by one more call, which is spared only where the sum of all takes twice as long as
    that of next to nothing. How many rows there are is known in each step only; where they are too
    many, the parts of the table turn dense on their way.
    """
    from labkit.simulate import simulate

    network = communicator.network
    if network is None or algorithm not in ("auto", *ALLREDUCE):
        return nbytes >= LEAST
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
    return least(seconds, f"simulated for {nbytes / 1e6:.3g} MB on {network}")


def _measured(communicator: Communicator, candidates: list[str], nbytes: int) -> Choice:
    clock, buffer = communicator.clock, communicator.allocate(max(nbytes // 4, 1))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(1 + CALLS):
        for name in candidates:
            communicator.meet("the choice of an algorithm")
            start = clock.now()
            communicator.allreduce(buffer, name)
            times[name].append(clock.now() - start)
    slowest = {
        name: float(np.median(np.max(communicator.allgather(own[1:]), axis=0)))
        for name, own in times.items()
    }
    return least(slowest, f"measured for {nbytes / 1e6:.3g} MB on {communicator.size} ranks")


def least(seconds: Mapping[str, float], how: str) -> Choice:
    """Who takes least of these, by name; the first of those that take as long."""
    ranked = sorted(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in ranked[:3])
    return Choice(ranked[0], f"{how}: {told}")
