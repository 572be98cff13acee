"""A cluster: whether it is up, how large it is, and who holds it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from labkit.common.html import card, pairs
from labkit.common.privacy import scrub

if TYPE_CHECKING:
    from labkit.cluster import Cluster


def cluster_html(cluster: Cluster) -> str:
    """State, ranks and threads, machine, leases.

    The machine has no name here: what a notebook shows is passed on.
    """
    import psutil

    from labkit.cluster.launch import leases

    cores = psutil.cpu_count(logical=True) or 1
    free = psutil.virtual_memory().available / 2**30
    state = cluster.state()
    said = f"{state['state']}{': ' if state['message'] else ''}{scrub(state['message'])}"
    up = state["state"] == "ready"
    more = cluster.workers * cluster.threads > cores
    return card(
        f"Cluster {cluster.name}",
        pairs(
            {
                "engines": "up" if up else said,
                "this object": "connected" if cluster.connected else "closed",
                "ranks": f"{cluster.workers} of {cluster.threads} threads"
                + (", more than there are cores" if more else ""),
                "host": f"this machine: {cores} cores, {free:.1f} GiB of memory free",
                "held by": _holders(leases(cluster.folder)) if up else "nobody",
            }
        ),
    )


def _holders(processes: list[int]) -> str:
    told = [f"process {pid}" + (" (this one)" if pid == os.getpid() else "") for pid in processes]
    return f"{', '.join(told) or 'a sweep'}; it ends with the last one"
