"""Hosts to measure on: those that the environment names, a testbed, or emulated ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from labkit.cluster import Cluster
from labkit.cluster.start import PLACES, VARIABLES
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.nearest import refuse_unknown
from labkit.common.quantities import bits_of
from labkit.frameworks.namespaces import FRAME
from labkit.hosts import testbed
from labkit.network import PRESETS, Network
from labkit.schedules import host_groups

# Of links that are emulated, between hosts and inside them.
BETWEEN, INSIDE = PRESETS["1GbE"], PRESETS["100Gb-infiniband"]
PAYLOAD = 1448  # bytes of a full frame that are TCP's: without headers and its time stamp


class HostSelection:
    """The hosts that variables such as LABKIT_LAUNCHER name, else a testbed, else emulated ones.

    Args:
        workers: ranks.
        nodes: hosts, from 2; of Slurm's where `--nodes` does not say more.
        bandwidth: of the link of each host, where it is made.
        place: "core" fills one host after the other, "node" deals ranks out in turn.

    Attributes:
        network: what is emulated; None: the link is real.
        link: what the link between hosts is called.
        said: the place of the ranks, and the reason.

    Raises:
        InvalidInput: what cannot be.
    """

    def __init__(
        self, workers: int = 4, nodes: int = 2, bandwidth: str = "1Gb/s", place: str = "core"
    ) -> None:
        bits_of(bandwidth, "bandwidth")
        refuse_unknown("place", [place], PLACES)
        if not 2 <= nodes <= workers:
            raise InvalidInput(f"nodes={nodes} for workers={workers}: give 2 or more, a rank each")
        self.network: Network | None = None
        self.link = f"{bandwidth} between {nodes} hosts"
        self._bed = ExitStack()
        self._asked: dict[str, Any] = {"workers": workers, "place": place}
        if named := _named(nodes):
            self._asked |= named
            self.link = "of the hosts"
            self.said = f"{workers} ranks on the hosts that this notebook was given"
            return
        try:
            bed = self._bed.enter_context(testbed(nodes, bandwidth=bandwidth, slurm=False))
        except LabkitError as error:
            self.link += ", emulated"
            self.network = _emulated(groups(workers, nodes, place), bandwidth, self.link)
            self._asked = {"workers": workers, "launcher": "local"}
            self.said = (
                f"{workers} ranks of this machine on an emulated network of {nodes} hosts: none "
                f"were named, and {error}"
            )
        else:
            self._asked["hosts"] = [f"{host}:{-(-workers // nodes)}" for host in bed.hosts]
            self.said = f"{workers} ranks on {nodes} hosts of a testbed, made for this: none named"

    @contextmanager
    def ranks(self) -> Iterator[Cluster]:
        """Start ranks on the hosts; a testbed ends with this context."""
        with self._bed, Cluster(**self._asked) as cluster:
            yield cluster


def share_of(bits: int) -> float:
    """Return the bytes/s of payload on a link of some bits/s."""
    return bits / 8 * PAYLOAD / FRAME


def groups(workers: int, nodes: int, place: str) -> list[list[int]]:
    """Return the ranks of each host.

    >>> groups(4, 2, "core"), groups(4, 2, "node")
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    if place == "node":
        return [list(range(host, workers, nodes)) for host in range(nodes)]
    return host_groups(workers, -(-workers // nodes))


def _named(nodes: int) -> dict[str, Any]:
    """Return the arguments of a cluster where the environment names a launcher, else none."""
    launcher = os.environ.get(VARIABLES["launcher"], "local")
    if launcher == "slurm":
        told = int(os.environ.get(VARIABLES["nodes"]) or 1)
        return {"launcher": launcher, "nodes": max(nodes, told)}
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
