"""Start and end clusters on two hosts many times, with each launcher.

Inside a Slurm job, `python -m tests.acceptance.hosts.starts REPEATS` prints one JSON line per
start.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.bench.timing import Row, head
from labkit.cluster import Cluster
from labkit.common.errors import LabkitError
from labkit.hosts import Testbed, testbed

RANKS, NODES = 4, 2
WAYS: Mapping[str, Mapping[str, Any]] = {
    "mpiexec": {"hosts": ["a:2", "b:2"]},
    "salloc, mpiexec": {"workers": RANKS, "nodes": NODES},
    "srun": {"workers": RANKS, "nodes": NODES, "launch_command": "srun"},
}
INSIDE = "in a job, mpiexec"
ENDS = 60.0  # seconds after which a remaining process counts as left over
OURS = "labkit.cluster|prted|prterun"  # pattern for command lines of a cluster's processes


def measure(repeats: int = 20) -> list[Row]:
    """Start and end clusters of 2 × 2 ranks; the launchers take turns.

    A start succeeds if all ranks form one MPI world on the requested hosts, and a call returns from
    all ranks. An end succeeds if no process of the cluster remains on a host, and no job remains in
    the queue.

    Args:
        repeats: Number of starts per launcher.

    Returns: One row per launcher: the seconds of starts and ends (median, minimum, p90), the number
        of successful starts, and the number of ends that left processes or jobs.
    """
    with testbed() as bed:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way, asked in WAYS.items():
                found[way].append(_once(asked, bed))
        found[INSIDE] = [*_inside(bed, repeats)]
    return [row_of(way, seconds, repeats) for way, seconds in found.items()]


def _once(asked: Mapping[str, Any], bed: Testbed | None) -> tuple[float, float]:
    """Return the seconds of a start and an end; NaN: failed; infinite: processes or jobs remain.

    If the start fails, the time of the end is NaN, or infinite if processes or jobs remain.
    """
    begin, started, cluster = time.monotonic(), np.nan, None
    try:
        with Cluster(**asked, name=f"start-{begin}") as cluster:
            come = cluster.call(lambda communicator: communicator.rank) == [*range(RANKS)]
            now = time.monotonic()
            started, begin = (now - begin if come else np.nan), now
    except LabkitError as error:
        print(error, file=sys.stderr)
        begin = time.monotonic()
    if _stays(lambda: (cluster and cluster.how_ended() is None) or (bed and _left(bed))):
        return started, np.inf
    return started, time.monotonic() - begin if np.isfinite(started) else np.nan


def _stays(is_there: Callable[[], object]) -> bool:
    """Return whether a condition still holds after the time that the end of a cluster may take."""
    limit = time.monotonic() + ENDS
    while is_there():
        if time.monotonic() > limit:
            return True
        time.sleep(0.1)
    return False


def _left(bed: Testbed) -> bool:
    """Return whether processes of a cluster run on a host, or jobs are in the queue."""
    jobs = bed.login(["squeue", "--noheader"]).stdout
    return bool(jobs) or any(bed.run(h, ["pgrep", "-f", OURS]).stdout for h in bed.hosts)


def _inside(bed: Testbed, repeats: int) -> Iterator[tuple[float, float]]:
    """Measure starts and ends of clusters inside one Slurm job, on the nodes of this job."""
    job = [
        "salloc",
        "--quiet",
        f"--nodes={NODES}",
        f"--ntasks={RANKS}",
        f"--ntasks-per-node={RANKS // NODES}",
    ]
    command = [*job, sys.executable, "-P", "-m", __name__, str(repeats)]
    done = bed.login(command)
    print(done.stderr, end="", file=sys.stderr)
    for line in done.stdout.splitlines():
        yield tuple(json.loads(line))
    if _stays(lambda: _left(bed)):
        yield np.nan, np.inf


def row_of(way: str, seconds: Sequence[tuple[float, float]], repeats: int) -> Row:
    """Return the row of a launcher from the seconds of its starts and ends; they may be empty."""
    row = head("hosts", way, "starts", RANKS, "1Gb/s between two hosts", repeats=repeats)
    starts, ends = np.reshape(seconds, (-1, 2)).T
    came, over = starts[np.isfinite(starts)], ends[np.isfinite(ends)]
    return row | {
        "launcher": way,
        "median_ms": 1e3 * float(np.median(came)) if len(came) else None,
        "min_ms": 1e3 * float(came.min()) if len(came) else None,
        "p90_ms": 1e3 * float(np.percentile(came, 90)) if len(came) else None,
        "end_ms": 1e3 * float(np.median(over)) if len(over) else None,
        "started": len(came),
        "left": int(np.isinf(ends).sum()),
    }


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        print(json.dumps(_once({"workers": RANKS, "launcher": "slurm"}, None)), flush=True)
