"""What ranks settle before the first step: that their gradients are the same, and the algorithm.

The one that is fastest here: measured on real ranks, computed on an emulated network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from labkit.communicator import Communicator, Mismatch

CALLS = 7

Signature: TypeAlias = list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype of each


@dataclass(frozen=True)
class Choice:
    """An algorithm, and why it was chosen."""

    algorithm: str
    why: str

    @property
    def in_place(self) -> bool:
        """Whether ranks add up in memory that they share, so that one copy serves all of them."""
        return self.algorithm == "shared_memory"


def agree(communicator: Communicator, signature: Signature) -> None:
    """Check that all ranks have the same gradients.

    Raises:
        Mismatch: names the first rank, tensor and shapes that differ.
    """
    told = communicator.allgather(signature, what="the agreement on the gradients")
    for rank, other in enumerate(told):
        if len(other) != len(told[0]):
            raise Mismatch(
                f"rank {rank} has {len(other)} gradients, rank 0 has {len(told[0])}: "
                "every rank must train the same model"
            )
        for (name, shape, dtype), mine in zip(other, told[0], strict=True):
            if (shape, dtype) != mine[1:]:
                raise Mismatch(
                    f"rank {rank} has {dtype}{list(shape)} for {name}, rank 0 has "
                    f"{mine[2]}{list(mine[1])} for {mine[0]}: every rank must train the same model"
                )


def choose(communicator: Communicator, algorithm: str, nbytes: int, dense: bool = True) -> Choice:
    """The algorithm to sum buckets of so many bytes with (collective, the same on all ranks).

    "auto" tries what this machine offers, `CALLS` times each after a warm-up, interleaved, and
    takes the least median of the slowest rank; on an emulated network the simulator decides. Of
    compressed buckets (not `dense`) nobody knows the bytes beforehand: without an emulated network
    the library's own collectives carry them.
    """
    if algorithm != "auto":
        return Choice(algorithm, "as asked for")
    if communicator.network is not None:
        return _simulated(communicator, nbytes)  # the same arithmetic on all ranks
    if not dense:
        return Choice("mpi", "payloads are small and of unequal size: the library's collectives")
    candidates = ["mpi", "ring"]
    if communicator.on_one_host:
        candidates.append("shared_memory")
    return _measured(communicator, candidates, nbytes)


def _simulated(communicator: Communicator, nbytes: int) -> Choice:
    from labkit.schedules import ALLREDUCE
    from labkit.simulate import simulate

    network = communicator.network
    assert network is not None
    seconds = {
        name: simulate(name, communicator.size, nbytes, network).seconds for name in ALLREDUCE
    }
    return _least(seconds, f"simulated for {nbytes / 1e6:.3g} MB on {network}")


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
    return _least(slowest, f"measured for {nbytes / 1e6:.3g} MB on {communicator.size} ranks")


def _least(seconds: dict[str, float], how: str) -> Choice:
    ranked = sorted(seconds, key=lambda name: seconds[name])
    told = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in ranked[:3])
    return Choice(ranked[0], f"{how}: {told}")
