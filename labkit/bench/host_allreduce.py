"""A benchmark of allreduces between hosts, compared with the simulator's predictions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.bench.host_selection import PAYLOAD, HostSelection, groups
from labkit.bench.timing import Row, head, spread, timed, verify_sum
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.common.units import bits_text, seconds_text
from labkit.communicator import Communicator, validate_algorithm
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import Simulation, simulate

SLICE = 0.25  # seconds spent on one algorithm and one size in one repeat
BASE = "ring"  # algorithm with which all other algorithms are compared
LARGE = 2**22  # bytes of the message that measures the bandwidth
PINGS, FEW = 200, 20  # number of round trips: with one byte, and with LARGE bytes


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

    Returns:
        The rows, and the network that the predictions assume: the emulated network, or a network
        whose latency and bandwidth were measured by ping-pong. The row of an algorithm and size
        contains the spread of the repeats' median call times (ms), `correct`, and `ratio`: the
        ring's time divided by the algorithm's time. `link_bytes` is the number of bytes per call
        that left the host of rank 0 (for "mpi" a lower bound). `wire_bytes` is the number of bytes
        per call that all ranks sent. If an algorithm has a schedule, its row also contains the
        simulated `predicted_ms`, `predicted_ratio` and `predicted_link_bytes`. `other_mapping_ms`
        is the simulated time if ranks are assigned to hosts by the other value of `map_by`.

    Raises:
        InvalidInput: All ranks are on one host.
    """
    network = on.network or _measured(cluster)
    if on.network:  # messages of the MPI library bypass the emulated network
        algorithms = [name for name in algorithms if name in ALLREDUCE]
    assert isinstance(network.hosts, tuple)  # tells the type checker the type
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
    """Measure the network of these ranks by ping-pong between two hosts and within one host."""
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
    """Measure latency and bandwidth of rank 0 to another host and within its host (collective)."""
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
    """A timer of allreduces that reuses one buffer for all algorithms with equal sizes."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: dict[int, np.ndarray] = {}

    def case(self, algorithm: str, nbytes: int, calls: int) -> tuple[float, bool, float, float]:
        """Return the median seconds per call, whether the sums are right, and two byte counts.

        The byte counts per call are the bytes that left the host of rank 0, and the bytes sent by
        all ranks.
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
        # The counted traffic includes the additional call that verifies the sum.
        return float(np.median(seconds)), right, link_bytes / (calls + 1), wire_bytes / (calls + 1)
