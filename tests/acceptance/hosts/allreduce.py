"""Time allreduces of ranks on two hosts: each algorithm, and an emulation of the hosts' link."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from labkit.bench import link
from labkit.bench.host_allreduce import share_of
from labkit.bench.linked_ranks import LinkedProcesses
from labkit.bench.timing import Row, head
from labkit.hosts import testbed
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import simulate
from tests.acceptance.hosts.ranks import ranks_on

ALGORITHMS = ("ring", "two_level", "two_level_butterfly", "hierarchical", "mpi")
NBYTES = 25_000_000
CALLS = 3
EACH = 2  # number of ranks per host
# The following constants are for the comparison with the emulation.
EMULATED = ("ring", "tree", "master_worker")
SIZES = (2**20, 8 * 2**20, 32 * 2**20)
RATE = "1Gb"


def measure_levels(
    repeats: int = 5, algorithms: Sequence[str] = ALGORITHMS, nbytes: int = NBYTES
) -> list[Row]:
    """Time float32 allreduces of 2 × 2 ranks at 1 Gb/s, placed by node; the algorithms alternate.

    Args:
        repeats: Number of rounds over all algorithms; each result is the median of `CALLS` calls.
        algorithms: Names of algorithms; the first is "ring", the reference of all ratios.
        nbytes: Size of the buffer, which is in memory that the ranks of a host share.

    Returns: One row per algorithm: the median, minimum and maximum of the repeats' medians (ms),
        and the ratio of its time to the ring's, with median, minimum and maximum over repeats.
        Simulated values use the measured latency between hosts and the measured paths inside the
        hosts. `link_bytes` is the number of bytes per call that left the first host, as counted by
        the ranks; `sent` is this number as counted by the host's network link.
    """
    with testbed(slurm=False) as bed, ranks_on(bed, EACH) as ranks:
        facts: Row = json.loads(ranks.answer())
        found = []
        for _ in range(repeats):
            for algorithm in algorithms:
                before = bed.sent(bed.hosts[0])
                ranks.ask([(algorithm, nbytes, CALLS)])
                (answer,) = json.loads(ranks.answer())
                # The ranks make one additional call, which checks the sum.
                sent = (bed.sent(bed.hosts[0]) - before) / (CALLS + 1)
                found.append((*answer, sent))
        network = Network(
            latency=facts["latency"],
            bandwidth=share_of(bed.plan.rate),
            hosts=EACH,
            host_latency=facts["inside_latency"],
            host_bandwidth=facts["inside_bandwidth"],
        )
        size = EACH * len(bed.hosts)
    # The array's axes are repeat, algorithm and column.
    values = np.array(found, float).reshape(repeats, len(algorithms), -1)
    rows = []
    for number, algorithm in enumerate(algorithms):
        row = head("hosts", algorithm, "levels", size, "1Gb/s between two hosts", repeats=repeats)
        row |= {"algorithm": algorithm, "bytes": nbytes, "calls": repeats * CALLS}
        rows.append(row | _times(values[:, number], values[:, 0]) | facts)
        if algorithm in ALLREDUCE:
            own, ring = (
                simulate(name, size, nbytes, network).seconds for name in (algorithm, algorithms[0])
            )
            rows[-1] |= {"predicted_ms": 1e3 * own, "predicted_ratio": own / ring}
    return rows


def _times(own: np.ndarray, ring: np.ndarray) -> Row:
    """Return the row of an algorithm from its measured values and those of the ring."""
    seconds, ratios = own[:, 0], own[:, 0] / ring[:, 0]
    return {
        "median_ms": 1e3 * float(np.median(seconds)),
        "min_ms": 1e3 * float(seconds.min()),
        "max_ms": 1e3 * float(seconds.max()),
        "ratio_to_ring": float(np.median(ratios)),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
        "correct": bool(own[:, 1].all()),
        "link_bytes": float(np.median(own[:, 2])),
        "sent": float(np.median(own[:, -1])),
    }


def measure_emulation(
    repeats: int = 5, algorithms: Sequence[str] = EMULATED, sizes: Sequence[int] = SIZES
) -> list[Row]:
    """Time allreduces of two ranks on two hosts, and of two ranks on an emulated link, in turns.

    Arguments and rows are those of `labkit.bench.link.measure`; that function's ranks use TCP
    without MPI.
    """
    rows = link.measure((RATE,), sizes, algorithms, repeats, joined=_on_two_hosts)
    return [row | {"bench": "hosts", "what": "emulated"} for row in rows]


@contextmanager
def _on_two_hosts(bits: int) -> Iterator[LinkedProcesses]:
    with testbed(bandwidth=f"{bits // 10**6}Mb/s", slurm=False) as bed, ranks_on(bed, 1) as ranks:
        yield ranks
