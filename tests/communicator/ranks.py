"""The work of each rank in a test under mpiexec; as a script, it prints all errors."""

import sys

import ml_dtypes
import numpy as np

from labkit.communicator import ALGORITHMS, Communicator, world
from labkit.schedules import ALLREDUCE
from labkit.schedules.interpreter import final_buffers

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32]


def on_hosts(algorithm: str, communicator: Communicator) -> dict[str, list[tuple[int, ...]]]:
    """Return an algorithm's layout on the real hosts, if the algorithm supports this layout."""
    hosts = set(communicator.allgather(tuple(communicator.board.ranks)))
    return {"hosts": sorted(hosts)} if ALLREDUCE[algorithm].layout == "hosts" else {}


def sums(communicator: Communicator) -> None:
    """Check each algorithm, type and length: correct sums, with the same bits on all ranks."""
    rng = np.random.default_rng(communicator.rank)
    for algorithm in ALGORITHMS:
        if algorithm == "shared_memory" and not communicator.on_one_host:
            continue
        drawn = ALLREDUCE.get(algorithm)
        rounds = drawn and list(drawn(communicator.size, **on_hosts(algorithm, communicator)))
        # Inside a host, shared memory adds 16-bit floats in float32.
        apart = drawn and drawn.between and not communicator.on_one_host
        for dtype in DTYPES:
            for length in (0, 1, max(communicator.size - 1, 1), 7, 1001):
                own = (rng.normal(size=length) * 8).astype(dtype)
                buffer = own.copy()
                communicator.allreduce(buffer, algorithm)
                given = communicator.allgather(own)
                ends = communicator.allgather(buffer.tobytes())
                case = f"{algorithm} {np.dtype(dtype)}[{length}] on {communicator.size}"
                if len(set(ends)) > 1:
                    print(f"different bits: {case}")
                exact = np.sum(np.array(given, np.float64), axis=0)
                eps = float(ml_dtypes.finfo(dtype).eps) if dtype != np.int32 else 0.0
                allowed = 2 * communicator.size * eps * np.abs(np.array(given, np.float64)).sum(0)
                if not np.all(np.abs(buffer.astype(np.float64) - exact) <= allowed):
                    print(f"wrong sum: {case}")
                if rounds and length and not (apart and np.dtype(dtype).itemsize == 2):
                    reference = final_buffers(rounds, np.array(given))
                    if reference[communicator.rank].tobytes() != buffer.tobytes():
                        print(f"not the bits of the reference: {case}")


def counts(communicator: Communicator) -> None:
    """Check that the messages and bytes of each algorithm equal its formula."""
    length = 5040 * 17  # divisible by each tested number of chunks
    for algorithm in ALLREDUCE:
        buffer = np.ones(length, np.float64)
        before = communicator.traffic.copy()
        communicator.allreduce(buffer, algorithm)
        sent = communicator.traffic.since(before)
        hosts = on_hosts(algorithm, communicator)
        formula = ALLREDUCE[algorithm].counts(communicator.size, **hosts)
        expected = (
            int(formula.messages[communicator.rank]),
            buffer.nbytes if communicator.size > 1 else 0,
            round(float(formula.bytes(buffer.nbytes)[communicator.rank])),
        )
        found = (sent.messages, sent.payload_bytes, sent.wire_bytes)
        chunks = formula.chunks  # if the buffer is not divisible, a chunk is one element longer
        slack = 0 if length % chunks == 0 else 8 * chunks
        if found[:2] != expected[:2] or abs(found[2] - expected[2]) > slack:
            print(f"{algorithm} on {communicator.size}: sent {found}, formula {expected}")


def main() -> None:
    """Usage: `ranks.py sums|counts [network]`; tests the first 1, 2, … ranks of the world."""
    what = {"sums": sums, "counts": counts}[sys.argv[1]]
    whole = world()
    for size in map(int, sys.argv[2].split(",")):
        part = whole.split(0 if whole.rank < size else 1)
        if whole.rank < size:
            what(part)
        part.close()
    if whole.rank == 0:
        print("done")


if __name__ == "__main__":
    main()
