"""Clusters on two hosts, started and ended again and again, by each launcher.

python -m labkit.bench.hosts.starts REPEATS    inside a job of Slurm: one JSON line a start
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
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
    "srun": {"workers": RANKS, "nodes": NODES, "step": "srun"},
}
INSIDE = "in a job, mpiexec"
ENDS = 60.0  # seconds that an end may take before what is left counts as left
OURS = "labkit.cluster|prted|prterun"  # in the command lines of what a cluster starts


def measure(repeats: int = 20) -> list[Row]:
    """Start and end clusters of 2 × 2 ranks in turn by each launcher.

    A start has succeeded when all ranks have met as one MPI world on the hosts that were asked
    for, and one call has come back from all of them; an end, when no process of it is on a host
    and no job is in the queue.

    Args:
        repeats: of each.

    Returns:
        One row a launcher: seconds of a start and of an end (median, least, p90), how many starts
        succeeded, and how many ends left something.
    """
    with testbed() as bed:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way, asked in WAYS.items():
                found[way].append(_once(asked, bed))
        found[INSIDE] = [*_inside(bed, repeats)]
    return [_row(way, np.array(seconds), repeats) for way, seconds in found.items()]


def _once(asked: Mapping[str, Any], bed: Testbed | None) -> tuple[float, float]:
    """Seconds of a start and of an end; NaN: it did not come; infinite: something was left."""
    begin = time.monotonic()
    try:
        with Cluster(**asked, name=f"start-{begin}") as cluster:
            if cluster.call(lambda communicator: communicator.rank) != [*range(RANKS)]:
                return np.nan, np.nan
            started = time.monotonic() - begin
            begin = time.monotonic()
    except LabkitError as error:
        print(error, file=sys.stderr)
        return np.nan, np.nan
    while cluster.how_ended() is None or (bed is not None and _left(bed)):
        if time.monotonic() - begin > ENDS:
            return started, np.inf
        time.sleep(0.1)
    return started, time.monotonic() - begin


def _left(bed: Testbed) -> bool:
    """Whether anything of a cluster is on a host or in the queue."""
    jobs = bed.login(["squeue", "--noheader"]).stdout
    return bool(jobs) or any(bed.run(h, ["pgrep", "-f", OURS]).stdout for h in bed.hosts)


def _inside(bed: Testbed, repeats: int) -> Iterator[tuple[float, float]]:
    """The same in one job of Slurm's, whose nodes each cluster takes."""
    job = [
        "salloc",
        "--quiet",
        f"--nodes={NODES}",
        f"--ntasks={RANKS}",
        f"--ntasks-per-node={RANKS // NODES}",
    ]
    command = [*job, sys.executable, "-m", __name__, str(repeats)]
    done = bed.login(command)
    for line in done.stdout.splitlines():
        yield tuple(json.loads(line))
    if _left(bed):
        yield np.nan, np.inf


def _row(way: str, seconds: np.ndarray, repeats: int) -> Row:
    row = head("hosts", way, "starts", RANKS, "1Gb/s between two hosts", repeats=repeats)
    starts, ends = seconds[:, 0], seconds[:, 1]
    came = starts[np.isfinite(starts)]
    return row | {
        "launcher": way,
        "median_ms": 1e3 * float(np.median(came)) if len(came) else None,
        "min_ms": 1e3 * float(came.min()) if len(came) else None,
        "p90_ms": 1e3 * float(np.percentile(came, 90)) if len(came) else None,
        "end_ms": 1e3 * float(np.nanmedian(ends)) if len(came) else None,
        "started": len(came),
        "left": int(np.isinf(ends).sum()),
    }


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        print(json.dumps(_once({"workers": RANKS, "launcher": "slurm"}, None)), flush=True)
