"""What ranks on several hosts do; it prints errors and the reason for the chosen algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from labkit.common.errors import InvalidInput
from labkit.communicator import ALGORITHMS, Communicator, world
from labkit.exchange.autotune import choose
from labkit.schedules import ALLREDUCE

LENGTHS = (0, 1, 7, 30_001)
LARGE = 2**21  # float32: 8 MiB
IN_LEVELS = [name for name, each in ALLREDUCE.items() if each.between is not None]
WHERE = [name for name in ALGORITHMS if name != "shared_memory"]


def means(communicator: Communicator) -> None:
    """Check that weighted means equal NumPy's, bit for bit on all ranks and kinds of memory."""
    random = np.random.default_rng(communicator.rank)
    weight = (0.0, 3.0, 1.0, 4.0)[communicator.rank]
    weights = communicator.allgather(weight)
    for algorithm in ("mpi", "ring", *IN_LEVELS):
        for kind in (np.dtype(each) for each in (np.float64, np.float32, ml_dtypes.bfloat16)):
            for length in LENGTHS:
                own = random.standard_normal(length).astype(kind)
                given = np.array(communicator.allgather(own), np.float64)
                exact = np.average(given, axis=0, weights=weights)
                for buffer in (np.empty(length, kind), communicator.allocate(length, kind)):
                    buffer[...] = own
                    communicator.mean(buffer, weight, algorithm)
                    case = f"{algorithm} {kind}[{length}] on {communicator.size}"
                    if len(set(communicator.allgather(buffer.tobytes()))) > 1:
                        print(f"different bits: {case}")
                    allowed = 8 * float(ml_dtypes.finfo(kind).eps) * np.abs(given).max(initial=0)
                    if np.abs(buffer.astype(np.float64) - exact).max(initial=0) > allowed:
                        print(f"wrong mean: {case}")


def counts(communicator: Communicator) -> None:
    """Print for each algorithm the bytes it reports as sent off this host, and the link's count."""
    buffer = communicator.allocate(LARGE)
    for algorithm in WHERE:
        communicator.barrier()
        before, link = communicator.traffic.copy(), sent()
        communicator.allreduce(buffer, algorithm)
        communicator.barrier()
        link, own = sent() - link, communicator.traffic.since(before).link_bytes
        here = communicator.board.ranks
        told = sum(communicator.allgather(own)[rank] for rank in here)
        if communicator.rank == here[0]:
            print(json.dumps([algorithm, told / buffer.nbytes, link / buffer.nbytes]), flush=True)


def sent() -> int:
    """Return the bytes that this host has sent, including packet headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counted = {line.split(":")[0].strip(): line.split(":")[1].split() for line in lines}
    return sum(int(columns[8]) for name, columns in counted.items() if name != "lo")


def main() -> None:
    whole = world()
    part = whole.split(0 if whole.rank < 3 else 1)  # groups of two ranks and of one rank
    for communicator in (part, whole) if whole.rank < 3 else (whole,):
        means(communicator)
    counts(whole)
    chosen = choose(whole, "auto", 2**20)
    if whole.rank == 0:
        print(json.dumps([chosen.algorithm, chosen.why]), flush=True)
    try:
        whole.allreduce(np.ones(3), "shared_memory")
    except InvalidInput as error:
        if "use 'two_level'" not in str(error):
            print(error)


if __name__ == "__main__":
    main()
