"""The emulated network held against two hosts: MPI ranks over their link, and on one host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from labkit.bench import link
from labkit.bench.linked_processes import Ranks
from labkit.bench.timing import Row
from labkit.hosts import testbed
from tests.acceptance.hosts.ranks import ranks_on

ALGORITHMS = ("ring", "tree", "master_worker")
SIZES = (2**20, 8 * 2**20, 32 * 2**20)
RATE = "1Gb"


def measure(
    repeats: int = 5, algorithms: Sequence[str] = ALGORITHMS, sizes: Sequence[int] = SIZES
) -> list[Row]:
    """Time allreduces of two ranks on two hosts, and on one that emulates the link, in turns.

    Args and rows: as `labkit.bench.link.measure`, whose ranks speak TCP without MPI.
    """
    rows = link.measure((RATE,), sizes, algorithms, repeats, joined=_on_two_hosts)
    return [row | {"bench": "hosts", "what": "emulated"} for row in rows]


@contextmanager
def _on_two_hosts(bits: int) -> Iterator[Ranks]:
    with testbed(bandwidth=f"{bits // 10**6}Mb/s", slurm=False) as bed, ranks_on(bed, 1) as ranks:
        yield ranks
