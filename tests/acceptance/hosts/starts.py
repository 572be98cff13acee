"""Start and end clusters on two hosts many times, by each launcher.

python -m tests.acceptance.hosts.starts REPEATS    inside a job of Slurm: one JSON line a start
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
    return [row_of(way, seconds, repeats) for way, seconds in found.items()]


def _once(asked: Mapping[str, Any], bed: Testbed | None) -> tuple[float, float]:
    """Seconds of a start and of an end; NaN: it did not come; infinite: something was left.

    Of what did not start an end is told only where it has left something.
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
    """Whether something is still there when an end should be over."""
    limit = time.monotonic() + ENDS
    while is_there():
        if time.monotonic() > limit:
            return True
        time.sleep(0.1)
    return False


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
    command = [*job, sys.executable, "-P", "-m", __name__, str(repeats)]
    done = bed.login(command)
    print(done.stderr, end="", file=sys.stderr)
    for line in done.stdout.splitlines():
        yield tuple(json.loads(line))
    if _stays(lambda: _left(bed)):
        yield np.nan, np.inf


def row_of(way: str, seconds: Sequence[tuple[float, float]], repeats: int) -> Row:
    """The row of a launcher, of the seconds of starts and ends; they may be none."""
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
