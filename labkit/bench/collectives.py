"""What an allreduce costs on this machine, or on an emulated network, beside its closed form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from labkit.bench.command import AS_JSON, NETWORK, TIMES, show_rows, sizes
from labkit.bench.timing import Row, check, head, spread, timed
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import ALGORITHMS, Communicator, check_algorithm, refuse_unmetered
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import closed_form

MIB = 2**20
SIZES = (MIB, 4 * MIB, 16 * MIB)
LARGEST = 2**34  # bytes of a buffer
MOST = 1024  # repeats, and ranks whose rounds fit into memory
SLICE = 0.25  # seconds spent on one algorithm and size in one repeat


class Case(NamedTuple):
    """What the ranks have measured of one algorithm and size.

    seconds: of single calls, an array a repeat; correct: whether all sums were right.
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
    """Time float32 allreduces of all algorithms and sizes, interleaved, and check their results.

    An allreduce lasts as long as its slowest rank, from a common start. "shared_memory" works on
    buffers from `Communicator.allocate`, the others on ordinary memory; "mpi" is the library's
    own in-place Allreduce.

    Args:
        workers: ranks.
        network: a network to emulate; None: this machine's own.
        algorithms: default: all that can run there.
        sizes: bytes of the buffer.
        repeats: rounds over all algorithms and sizes; a median each.

    Returns:
        One row an algorithm and size: median, least and 90th percentile of the repeats' medians,
        p50 and p99 of all single calls (ms), algbw and busbw (bytes/s), `correct`; on an emulated
        network also the closed form and the error against it, else the ratio to "mpi".
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
    """Refuse what `measure` cannot do, and ranks that nobody can simulate, before anything starts.

    Raises: InvalidInput.
    """
    for algorithm in algorithms:
        check_algorithm(algorithm)
        refuse_unmetered(algorithm, network)
    if not sizes or not all(4 <= size <= LARGEST for size in sizes):
        raise InvalidInput(f"sizes={short(list(sizes))}: give bytes, each from 4 to {LARGEST:,}")
    if not 1 <= repeats <= MOST:
        raise InvalidInput(f"repeats={short(repeats)}: give a whole number from 1 to {MOST:,}")
    if not 2 <= simulated <= MOST:
        raise InvalidInput(f"{short(simulated)} ranks cannot be simulated: give 2 to {MOST:,}")


def timed_calls(
    communicator: Communicator, algorithms: list[str], sizes: list[int], repeats: int
) -> list[Case]:
    """Time single calls on each rank, by repeat; a call lasts as long as on the slowest rank."""
    cases: dict[tuple[str, int], list[np.ndarray]] = {}
    correct: dict[tuple[str, int], bool] = {}
    # One buffer for all algorithms that can work on it: what is timed is not how memory is got.
    buffers = {
        (shared, nbytes): communicator.allocate(nbytes // 4)
        if shared
        else np.zeros(nbytes // 4, np.float32)
        for nbytes in sizes
        for shared in {algorithm == "shared_memory" for algorithm in algorithms}
    }
    # All algorithms in every repeat: a machine that slows down does so for all of them.
    for _ in range(repeats):
        for nbytes in sizes:
            for algorithm in algorithms:
                buffer = buffers[algorithm == "shared_memory", nbytes]
                case = (algorithm, nbytes)
                right = check(communicator, algorithm, buffer)
                correct[case] = correct.get(case, True) and right
                # One call, to learn how many fill a slice of time; then those.
                first = timed(communicator, algorithm, buffer, 1)
                calls = int(np.clip(SLICE / first[0], 3, 50))
                cases.setdefault(case, []).append(timed(communicator, algorithm, buffer, calls))
    return [Case(*case, seconds, correct[case]) for case, seconds in cases.items()]


def _row(case: Case, workers: int, network: Network | None, repeats: int) -> Row:
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
        # What a link must carry at least for a sum, so that numbers of ranks can be compared.
        "busbw": algbw * 2 * (workers - 1) / workers,
        "correct": case.correct,
    }
    if network is None:
        return row
    form = closed_form(case.algorithm, workers, case.nbytes, network)
    return row | {"closed_form_ms": 1e3 * form, "error": median / form - 1 if form else 0.0}


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Beside each time its ratio to that of the library at the same size."""
    library = {row["bytes"]: row["median_ms"] for row in rows if row["algorithm"] == "mpi"}
    for row in rows:
        mine, other = row["median_ms"], library.get(row["bytes"])
        if isinstance(mine, float) and isinstance(other, float):
            row["ratio_to_mpi"] = mine / other
    return rows


@click.command("collectives")
@click.option("--workers", default=2, show_default=True, help="MPI ranks.")
@NETWORK
@click.option("--algorithms", default=None, help="Names with commas; default: all that can run.")
@click.option("--bytes", "sizes", default="1MiB,4MiB,16MiB", callback=sizes)
@click.option("--repeats", default=5, show_default=True)
@AS_JSON
def command(
    workers: int,
    network: str | None,
    algorithms: str | None,
    sizes: list[int],
    repeats: int,
    file: Path | None,
) -> None:
    """Time every allreduce algorithm beside the MPI library's own, or beside its closed form."""
    # None: which algorithms can run depends on the network, and `measure` knows.
    names = algorithms.split(",") if algorithms else None
    rows = measure(workers, network, names, sizes, repeats)
    columns = {"algorithm": "algorithm", "bytes": "bytes"} | TIMES
    columns |= {"p99_ms": "p99 of calls", "busbw": "busbw B/s"}
    emulated = {"closed_form_ms": "formula ms", "error": "error"}
    columns |= {"ratio_to_mpi": "ratio"} if network is None else emulated
    show_rows(rows, columns | {"correct": "correct"}, file)
