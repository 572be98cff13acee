"""A benchmark of allreduces between hosts, compared with the simulator's predictions.

If environment variables name hosts, the benchmark uses these hosts. If not, it uses a testbed or
emulated hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from labkit.bench.timing import Row, head, spread, timed, verify_sum
from labkit.cluster import Cluster
from labkit.cluster.start import MAPPINGS, VARIABLES
from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.common.nearest import refuse_unknown
from labkit.common.quantities import bits_of
from labkit.common.units import bits_text, seconds_text
from labkit.communicator import Communicator, validate_algorithm
from labkit.frameworks.namespaces import FRAME
from labkit.hosts import testbed
from labkit.network import PRESETS, Network
from labkit.schedules import ALLREDUCE, host_groups
from labkit.simulate import Simulation, simulate

# In one repeat, each algorithm runs for SLICE seconds with each buffer size.
SLICE = 0.25
BASE = "ring"  # The constant BASE names the algorithm with which all other algorithms are compared.
LARGE = 2**22  # The constant LARGE is the size in bytes of the message that measures the bandwidth.
# The constant PINGS is the number of round trips with one-byte messages. The constant FEW is the
# number of round trips with large messages.
PINGS, FEW = 200, 20
# The constants BETWEEN and INSIDE are network presets for emulated links. BETWEEN describes links
# between hosts, and INSIDE describes links inside a host.
BETWEEN, INSIDE = PRESETS["1GbE"], PRESETS["100Gb-infiniband"]
# A full Ethernet frame carries PAYLOAD bytes of TCP payload, besides the headers and the TCP
# timestamp.
PAYLOAD = 1448


def refuse_impossible(
    algorithms: Sequence[str], sizes: Sequence[int], repeats: int, trained: Sequence[str] = (BASE,)
) -> None:
    """Raise InvalidInput for arguments that `measure` does not support."""
    for names in (algorithms, trained):
        for name in names:
            validate_algorithm(name)
        if BASE not in names or "shared_memory" in names:
            raise InvalidInput(
                f"algorithms={short(list(names))} between hosts: include {BASE!r}, which is the "
                "baseline, and omit 'shared_memory', which sums within one host"
            )
    if min(sizes, default=0) < 4 or repeats < 1:
        raise InvalidInput(
            f"sizes={short(list(sizes))}, repeats={repeats}: give sizes of at least 4 bytes, "
            "and at least 1 repeat"
        )


def measure(
    on: HostSelection,
    cluster: Cluster,
    algorithms: Sequence[str],
    sizes: Sequence[int],
    repeats: int = 5,
) -> tuple[list[Row], Network]:
    """Measure float32 allreduces of all algorithms and sizes in turn, and verify the sums.

    Returns: The rows, and the network that the predictions assume. The assumed network is the
        emulated network, or has the latency and bandwidth that a ping-pong measured. A row contains
        the spread of the repeats' median call times (ms), `correct`, and `ratio`. `ratio` is the
        ring's time divided by the algorithm's time. `link_bytes` counts the bytes per call that
        left the host of rank 0. For the algorithm "mpi", `link_bytes` is a lower bound.
        `wire_bytes` is the number of bytes per call that all ranks sent. If an algorithm has a
        schedule, its row also contains predictions by simulation. The simulator predicts
        `predicted_ms`, `predicted_ratio` and `predicted_link_bytes`. `other_mapping_ms` is the
        simulated time with the other assignment of ranks to hosts. The two assignments of ranks to
        hosts are "slot" and "node".

    Raises:
        InvalidInput: All ranks are on one host.
    """
    network = on.network or _measured(cluster)
    # On an emulated network, only labkit's own algorithms are measured. Messages of the MPI library
    # bypass the emulated network.
    if on.network:
        algorithms = [name for name in algorithms if name in ALLREDUCE]
    # The type checker does not know that `network.hosts` is a tuple.
    assert isinstance(network.hosts, tuple)
    size, hosts = cluster.workers, [list(group) for group in network.hosts]
    other = "node" if hosts == groups(size, len(hosts), "slot") else "slot"
    apart = network.model_copy(update={"hosts": tuple(map(tuple, groups(size, len(hosts), other)))})
    pairs = [(algorithm, nbytes) for nbytes in sizes for algorithm in algorithms]
    found = {pair: _predicted(*pair, size, network) for pair in pairs}
    calls = [int(np.clip(SLICE / found[pair].seconds, 3, 50)) for pair in pairs]
    cases = [(*pair, count) for pair, count in zip(pairs, calls, strict=True)]
    answered = np.array(cluster.call(_timed, cases, repeats, network=on.network)[0])
    answers = {pair: answered[:, number].T for number, pair in enumerate(pairs)}
    rows = []
    for (name, nbytes), (seconds, right, link, wire) in answers.items():
        ratios = answers[BASE, nbytes][0] / seconds
        row = head("hosts", f"{name} {nbytes} bytes", "allreduce", size, on.link, repeats=repeats)
        row |= {"bytes": nbytes, "algorithm": name, **spread(seconds.tolist())}
        row |= {"correct": bool(right.all()), "wire_bytes": float(np.median(wire))}
        row |= {"ratio": float(np.median(ratios))}
        row |= {"ratio_min": float(ratios.min()), "ratio_max": float(ratios.max())}
        # Emulated hosts share one real host, so no bytes leave the real host.
        row |= {"link_bytes": None if on.network else float(np.median(link))}
        if name in ALLREDUCE:
            own = found[name, nbytes]
            row |= {"predicted_ms": 1e3 * own.seconds, "predicted_link_bytes": _out(own, network)}
            row |= {"predicted_ratio": found[BASE, nbytes].seconds / own.seconds}
            row |= {"other_mapping_ms": 1e3 * _predicted(name, nbytes, size, apart).seconds}
        rows.append(row)
    return rows, network


def _timed(
    communicator: Communicator, cases: list[tuple[str, int, int]], repeats: int
) -> list[list[tuple[float, bool, float, float]]]:
    sums = Sums(communicator)
    return [[sums.case(*case) for case in cases] for _ in range(repeats)]


def _measured(cluster: Cluster) -> Network:
    """Measure a cluster's network by ping-pong between two hosts and within one host."""
    hosts = sorted({tuple(each) for each in cluster.call(_here)})
    if len(hosts) < 2:
        raise InvalidInput(
            f"all {cluster.workers} ranks are on one host: give more workers, or map_by='node'"
        )
    way = cluster.call(ways)[0]
    return Network(
        name=f"{seconds_text(way['latency'])}, {bits_text(way['bandwidth'])}, by ping-pong",
        latency=way["latency"],
        bandwidth=way["bandwidth"],
        hosts=tuple(hosts),
        host_latency=way.get("inside_latency"),
        host_bandwidth=way.get("inside_bandwidth"),
    )


def _here(communicator: Communicator) -> list[int]:
    return communicator.board.ranks


def _predicted(name: str, nbytes: int, size: int, network: Network) -> Simulation:
    """Simulate an algorithm; for an algorithm without a schedule, simulate the ring instead."""
    return simulate(name if name in ALLREDUCE else BASE, size, nbytes, network)


def _out(found: Simulation, network: Network) -> float:
    """Return how many bytes leave the first host in one simulated allreduce."""
    return float(found.occupied[found.links.index("host 0 out")] * network.bandwidth)


def ways(communicator: Communicator) -> dict[str, float]:
    """Measure rank 0's latency and bandwidth to another host and inside its host (collective)."""
    here = communicator.broadcast_object(communicator.board.ranks)
    apart = [rank for rank in range(communicator.size) if rank not in here]
    found = {"payload": float(PAYLOAD)}
    for others, before in ((apart, ""), (here[1:], "inside_")):
        if others:
            latency = trip(communicator, others[0], 1, PINGS)
            whole = trip(communicator, others[0], LARGE, FEW)
            found |= {f"{before}latency": latency, f"{before}bandwidth": LARGE / (whole - latency)}
    return found


def trip(communicator: Communicator, other: int, nbytes: int, pings: int) -> float:
    """Return half the median round-trip time in s from rank 0 to rank `other` (collective)."""
    seconds, clock, data = [], communicator.clock, np.zeros(nbytes, np.uint8)
    communicator.barrier()
    for _ in range(pings if communicator.rank in (0, other) else 0):
        start = clock.now()
        if communicator.rank == 0:
            communicator.send(data, other)
            communicator.recv(data, other)
        else:
            communicator.recv(data, 0)
            communicator.send(data, 0)
        seconds.append(clock.now() - start)
    return float(np.median(communicator.broadcast_object(seconds))) / 2


class Sums:
    """A timer of allreduces, which keeps one buffer for each buffer size."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: dict[int, np.ndarray] = {}

    def case(self, algorithm: str, nbytes: int, calls: int) -> tuple[float, bool, float, float]:
        """Return median seconds per call, whether all sums are right, and sent bytes per call.

        The first byte count is the bytes that left the host of rank 0. The second byte count is the
        bytes that all ranks sent.
        """
        ranks = self._communicator
        if nbytes not in self._buffers:
            self._buffers[nbytes] = ranks.allocate(nbytes // 4)
        before, buffer = ranks.traffic.copy(), self._buffers[nbytes]
        right = verify_sum(ranks, algorithm, buffer)
        seconds = timed(ranks, algorithm, buffer, calls)
        sent = ranks.allgather(ranks.traffic.since(before))
        link_bytes = sum(sent[rank].link_bytes for rank in ranks.board.ranks)
        wire_bytes = sum(traffic.wire_bytes for traffic in sent)
        # The traffic of `calls + 1` calls is counted, because an additional call verifies the sum.
        return float(np.median(seconds)), right, link_bytes / (calls + 1), wire_bytes / (calls + 1)


class HostSelection:
    """The hosts of a benchmark: hosts that the environment names, a testbed, or emulated hosts.

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
        """Start ranks on the selected hosts; remove a testbed at the end of the context."""
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
    """Return Cluster arguments for the launcher that an environment variable names, or {}."""
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
