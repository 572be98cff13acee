"""Allreduces of ranks on two hosts: by algorithm, and beside the emulation of their link."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from labkit.bench import link
from labkit.bench.host_selection import share_of
from labkit.bench.linked_processes import LinkedProcesses
from labkit.bench.timing import Row, head
from labkit.hosts import testbed
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import simulate
from tests.acceptance.hosts.ranks import ranks_on

ALGORITHMS = ("ring", "two_level", "two_level_butterfly", "hierarchical", "mpi")
NBYTES = 25_000_000
CALLS = 3
EACH = 2  # ranks on a host
# Of the emulation
EMULATED = ("ring", "tree", "master_worker")
SIZES = (2**20, 8 * 2**20, 32 * 2**20)
RATE = "1Gb"


def measure_levels(
    repeats: int = 5, algorithms: Sequence[str] = ALGORITHMS, nbytes: int = NBYTES
) -> list[Row]:
    """Time float32 allreduces of 2 × 2 ranks placed by node at 1 Gb/s, interleaved.

    Args:
        repeats: rounds over all algorithms; a median of `CALLS` calls each.
        algorithms: "ring" first, to whose time the others' are held.
        nbytes: of the buffer, which lies in memory that a host's ranks share.

    Returns:
        One row an algorithm: median, least and greatest of the repeats' medians (ms); the ratio to
        the ring's by repeat, its median, least and greatest; both as simulated, with the latency
        measured there and what ways inside the hosts take; bytes that left the first host in a
        call as ranks have counted (`link_bytes`), and as its link has (`sent`).
    """
    with testbed(slurm=False) as bed, ranks_on(bed, EACH) as ranks:
        facts: Row = json.loads(ranks.answer())
        found = []
        for _ in range(repeats):
            for algorithm in algorithms:
                before = bed.sent(bed.hosts[0])
                ranks.ask([(algorithm, nbytes, CALLS)])
                (answer,) = json.loads(ranks.answer())
                sent = (bed.sent(bed.hosts[0]) - before) / (CALLS + 1)  # one more is the check
                found.append((*answer, sent))
        network = Network(
            latency=facts["latency"],
            bandwidth=share_of(bed.plan.rate),
            hosts=EACH,
            host_latency=facts["inside_latency"],
            host_bandwidth=facts["inside_bandwidth"],
        )
        size = EACH * len(bed.hosts)
    # Shape (repeat, algorithm, what).
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
    """Of an algorithm and the ring; columns as ranks answer, then what the link has counted."""
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
    """Time allreduces of two ranks on two hosts, and on one that emulates the link, in turns.

    Args and rows: as `labkit.bench.link.measure`, whose ranks speak TCP without MPI.
    """
    rows = link.measure((RATE,), sizes, algorithms, repeats, joined=_on_two_hosts)
    return [row | {"bench": "hosts", "what": "emulated"} for row in rows]


@contextmanager
def _on_two_hosts(bits: int) -> Iterator[LinkedProcesses]:
    with testbed(bandwidth=f"{bits // 10**6}Mb/s", slurm=False) as bed, ranks_on(bed, 1) as ranks:
        yield ranks
