"""A benchmark of allreduce algorithms on this machine or on an emulated network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from labkit.bench.command import AS_JSON, NETWORK, TIMES, show_rows, sizes
from labkit.bench.timing import Row, head, spread, timed, verify_sum
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import ALGORITHMS, Communicator, refuse_unmetered, validate_algorithm
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import closed_form

MIB = 2**20
SIZES = (MIB, 4 * MIB, 16 * MIB)
LARGEST = 2**34  # The constant LARGEST is the maximum size of a buffer in bytes.
# The constant MOST limits both the number of repeats and the number of simulated ranks.
MOST = 1024
# In one repeat, each algorithm runs for SLICE seconds with each buffer size.
SLICE = 0.25


class CollectiveTiming(NamedTuple):
    """The measurement of one algorithm at one buffer size.

    Attributes:
        algorithm: Name of the algorithm.
        nbytes: Size of the buffer in bytes.
        seconds: Seconds of each call, as one array per repeat.
        correct: Whether all verified sums are right.
    """

    algorithm: str
    nbytes: int
    seconds: list[np.ndarray]
    correct: bool


def measure(
    workers: int = 2,
    network: str | Network | None = None,
    algorithms: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
) -> list[Row]:
    """Measure float32 allreduces of all algorithms and sizes in turn, and verify the sums.

    An allreduce begins on all ranks at the same time. Its time is the time until the slowest rank
    has finished. The algorithm "shared_memory" sums buffers that `Communicator.allocate` returns.
    The other algorithms sum buffers in ordinary memory. The algorithm "mpi" is the in-place
    Allreduce of the MPI library.

    Args:
        workers: Number of ranks.
        network: Network to emulate; None: no emulation.
        algorithms: Names of algorithms. By default, all algorithms that support the network are
            measured.
        sizes: Buffer sizes in bytes.
        repeats: Number of repeats. Each repeat times all algorithms and sizes, and gives one median
            per algorithm and size.

    Returns: One row per algorithm and size. A row contains median, minimum and 90th percentile of
        the repeats' medians in ms. A row also contains p50 and p99 of all calls in ms. It also
        contains algbw and busbw (bytes/s, defined as in nccl-tests), and `correct`. With an
        emulated network, a row also contains the time by the closed formula. A row then also
        contains the relative difference between formula and measurement. Without an emulated
        network, a row contains the ratio of the algorithm's time to the time of "mpi".
    """
    chosen = list(algorithms or (ALLREDUCE if network is not None else ALGORITHMS))
    refuse_impossible(network, chosen, sizes, repeats)
    with Cluster(workers=workers) as cluster:
        found = cluster.call(
            timed_calls, chosen, list(sizes), repeats, ranks=workers, network=network
        )
    rows = [_row(case, workers, Network.parse(network), repeats) for case in found[0]]
    return rows if network is not None else _with_ratios(rows)


def refuse_impossible(
    network: str | Network | None,
    algorithms: Sequence[str],
    sizes: Sequence[int],
    repeats: int,
    simulated: int = 2,
) -> None:
    """Raise InvalidInput for invalid arguments of `measure`, or too many simulated ranks."""
    for algorithm in algorithms:
        validate_algorithm(algorithm)
        refuse_unmetered(algorithm, network)
    if not sizes or not all(4 <= size <= LARGEST for size in sizes):
        raise InvalidInput(f"sizes={short(list(sizes))}: give sizes from 4 to {LARGEST:,} bytes")
    if not 1 <= repeats <= MOST:
        raise InvalidInput(f"repeats={short(repeats)}: give a whole number from 1 to {MOST:,}")
    if not 2 <= simulated <= MOST:
        raise InvalidInput(f"{short(simulated)} ranks cannot be simulated; give 2 to {MOST:,}")


def timed_calls(
    communicator: Communicator, algorithms: list[str], sizes: list[int], repeats: int
) -> list[CollectiveTiming]:
    """Measure the slowest rank's time for each call of each algorithm and size (on ranks)."""
    cases: dict[tuple[str, int], list[np.ndarray]] = {}
    correct: dict[tuple[str, int], bool] = {}
    # Buffers are allocated before the timed calls, so that memory allocation is not timed.
    buffers = {
        (shared, nbytes): communicator.allocate(nbytes // 4)
        if shared
        else np.zeros(nbytes // 4, np.float32)
        for nbytes in sizes
        for shared in {algorithm == "shared_memory" for algorithm in algorithms}
    }
    # Every repeat times all algorithms, so that changes of the machine's speed affect all
    # algorithms.
    for _ in range(repeats):
        for nbytes in sizes:
            for algorithm in algorithms:
                buffer = buffers[algorithm == "shared_memory", nbytes]
                case = (algorithm, nbytes)
                right = verify_sum(communicator, algorithm, buffer)
                correct[case] = correct.get(case, True) and right
                first = timed(communicator, algorithm, buffer, 1)
                calls = int(np.clip(SLICE / first[0], 3, 50))
                cases.setdefault(case, []).append(timed(communicator, algorithm, buffer, calls))
    return [CollectiveTiming(*case, seconds, correct[case]) for case, seconds in cases.items()]


def _row(case: CollectiveTiming, workers: int, network: Network | None, repeats: int) -> Row:
    medians = [float(np.median(seconds)) for seconds in case.seconds]
    single = np.concatenate(case.seconds)
    median = float(np.median(medians))
    algbw = case.nbytes / median
    name, line = f"{case.algorithm} {case.nbytes} bytes", None if network is None else str(network)
    row = head("collectives", name, "allreduce", workers, line, repeats=repeats, bytes=case.nbytes)
    row |= spread(medians) | {
        "algorithm": case.algorithm,
        "p50_ms": 1e3 * float(np.percentile(single, 50)),
        "p99_ms": 1e3 * float(np.percentile(single, 99)),
        "calls": len(single),
        "algbw": algbw,
        # The bus bandwidth `busbw` counts the bytes per link. Values of `busbw` are comparable
        # between different numbers of ranks.
        "busbw": algbw * 2 * (workers - 1) / workers,
        "correct": case.correct,
    }
    if network is None:
        return row
    form = closed_form(case.algorithm, workers, case.nbytes, network)
    return row | {"closed_form_ms": 1e3 * form, "error": median / form - 1 if form else 0.0}


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Add the ratio of each time to the MPI library's time at the same size."""
    library = {row["bytes"]: row["median_ms"] for row in rows if row["algorithm"] == "mpi"}
    for row in rows:
        mine, other = row["median_ms"], library.get(row["bytes"])
        if isinstance(mine, float) and isinstance(other, float):
            row["ratio_to_mpi"] = mine / other
    return rows


@click.command("collectives")
@click.option("--workers", default=2, show_default=True, help="Number of MPI ranks.")
@NETWORK
@click.option(
    "--algorithms", default=None, help="Allreduce algorithms, separated by commas.  [default: all]"
)
@click.option("--bytes", "sizes", default="1MiB,4MiB,16MiB", callback=sizes, help="Buffer sizes.")
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats.")
@AS_JSON
def command(
    workers: int,
    network: str | None,
    algorithms: str | None,
    sizes: list[int],
    repeats: int,
    file: Path | None,
) -> None:
    """Compare allreduce times with those of the MPI library or with closed-form times."""
    # If `algorithms` is None, `measure` chooses the algorithms that support the network.
    names = algorithms.split(",") if algorithms else None
    rows = measure(workers, network, names, sizes, repeats)
    columns = {"algorithm": "algorithm", "bytes": "bytes"} | TIMES
    columns |= {"p99_ms": "p99 of calls", "busbw": "busbw B/s"}
    emulated = {"closed_form_ms": "formula ms", "error": "error"}
    columns |= {"ratio_to_mpi": "ratio"} if network is None else emulated
    show_rows(rows, columns | {"correct": "correct"}, file)
