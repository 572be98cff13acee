"""The choice of hosts for a benchmark: the environment's hosts, a testbed, or emulated hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from labkit.cluster import Cluster
from labkit.cluster.start import MAPPINGS, VARIABLES
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.nearest import refuse_unknown
from labkit.common.quantities import bits_of
from labkit.frameworks.namespaces import FRAME
from labkit.hosts import testbed
from labkit.network import PRESETS, Network
from labkit.schedules import host_groups

# BETWEEN is the preset of the emulated links between hosts, and INSIDE is the preset of the links
# inside a host.
BETWEEN, INSIDE = PRESETS["1GbE"], PRESETS["100Gb-infiniband"]
PAYLOAD = 1448  # bytes of TCP payload in a full Ethernet frame, without the TCP timestamp


class HostSelection:
    """The hosts of a benchmark: those that the environment names, a testbed, or emulated hosts.

    Args:
        workers: Number of ranks.
        nodes: Number of hosts, 2 or more. With Slurm, `nodes` is only a minimum, because `--nodes`
            may request more hosts.
        bandwidth: Bandwidth of each host's link in a testbed or an emulated network.
        map_by: "slot" fills one host after another; "node" assigns ranks to hosts round-robin.

    Attributes:
        network: The emulated network; None: the hosts are connected by a real link.
        link: Description of the link between hosts.
        description: Sentence that states on which hosts the ranks run, and why.

    Raises:
        InvalidInput: An argument is invalid.
    """

    def __init__(
        self, workers: int = 4, nodes: int = 2, bandwidth: str = "1Gb/s", map_by: str = "slot"
    ) -> None:
        bits_of(bandwidth, "bandwidth")
        refuse_unknown("map_by", [map_by], MAPPINGS)
        if not 2 <= nodes <= workers:
            raise InvalidInput(
                f"nodes={nodes} for workers={workers}: give at least 2 nodes, and at most one "
                "per worker"
            )
        self.network: Network | None = None
        self.link = f"{bandwidth} between {nodes} hosts"
        self._testbed = ExitStack()
        self._cluster_options: dict[str, Any] = {"workers": workers, "map_by": map_by}
        if options := _named(nodes):
            self._cluster_options |= options
            self.link = "of the hosts"
            self.description = f"{workers} ranks on the hosts that environment variables name"
            return
        try:
            bed = self._testbed.enter_context(testbed(nodes, bandwidth=bandwidth, slurm=False))
        except LabkitError as error:
            self.link += ", emulated"
            self.network = _emulated(groups(workers, nodes, map_by), bandwidth, self.link)
            self._cluster_options = {"workers": workers, "launcher": "local"}
            self.description = (
                f"{workers} ranks of this machine on an emulated network of {nodes} hosts: the "
                f"environment variables name no hosts, and {error}"
            )
        else:
            self._cluster_options["hosts"] = [
                f"{host}:{-(-workers // nodes)}" for host in bed.hosts
            ]
            self.description = (
                f"{workers} ranks on {nodes} hosts of an emulated testbed, because environment "
                "variables name no hosts"
            )

    @contextmanager
    def ranks(self) -> Iterator[Cluster]:
        """Start ranks on the selected hosts; a testbed is removed at the end of this context."""
        with self._testbed, Cluster(**self._cluster_options) as cluster:
            yield cluster


def share_of(bits: int) -> float:
    """Return the TCP payload rate in bytes/s of a link with a rate of `bits` bits/s."""
    return bits / 8 * PAYLOAD / FRAME


def groups(workers: int, nodes: int, map_by: str) -> list[list[int]]:
    """Return the rank numbers of each host, as `map_by` assigns ranks to hosts.

    >>> groups(4, 2, "slot"), groups(4, 2, "node")
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    if map_by == "node":
        return [list(range(host, workers, nodes)) for host in range(nodes)]
    return host_groups(workers, -(-workers // nodes))


def _named(nodes: int) -> dict[str, Any]:
    """Return the Cluster arguments for the launcher that the environment implies, or {}."""
    launcher = os.environ.get(VARIABLES["launcher"], "local")
    if launcher == "slurm":
        requested = int(os.environ.get(VARIABLES["nodes"]) or 1)
        return {"launcher": launcher, "nodes": max(nodes, requested)}
    return {} if launcher == "local" else {"launcher": launcher}


def _emulated(hosts: list[list[int]], bandwidth: str, name: str) -> Network:
    return Network(
        name=name,
        latency=BETWEEN.latency,
        bandwidth=share_of(bits_of(bandwidth, "bandwidth")),
        hosts=tuple(map(tuple, hosts)),
        host_latency=INSIDE.latency,
        host_bandwidth=INSIDE.bandwidth,
    )
