"""Allreduces between hosts, measured on the ranks of a cluster and predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.bench.host_selection import PAYLOAD, HostSelection, groups
from labkit.bench.timing import Row, check, head, spread, timed
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.common.units import bits_text, seconds_text
from labkit.communicator import Communicator, check_algorithm
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import Simulation, simulate

SLICE = 0.25  # seconds spent on one algorithm and size in one repeat
BASE = "ring"  # to which the others are held
LARGE = 2**22  # bytes of a message whose time tells the bandwidth
PINGS, FEW = 200, 20  # round trips of one byte, and of LARGE bytes


def refuse_impossible(
    algorithms: Sequence[str], sizes: Sequence[int], repeats: int, trained: Sequence[str] = (BASE,)
) -> None:
    """Refuse impossible arguments before anything starts. Raises: InvalidInput."""
    for names in (algorithms, trained):
        for name in names:
            check_algorithm(name)
        if BASE not in names or "shared_memory" in names:
            raise InvalidInput(f"{short(list(names))} between hosts: give {BASE!r}, and others")
    if min(sizes, default=0) < 4 or repeats < 1:
        raise InvalidInput(f"sizes={short(list(sizes))}, repeats={repeats}: give 4 bytes, 1 repeat")


def measure(
    on: HostSelection,
    cluster: Cluster,
    algorithms: Sequence[str],
    sizes: Sequence[int],
    repeats: int = 5,
) -> tuple[list[Row], Network]:
    """Time float32 allreduces of all algorithms and sizes, interleaved, and check the sums.

    Returns:
        A row an algorithm and size: spread over repeats of median calls (ms); `correct`; how many
        times as long the ring takes, `ratio` by repeat; `link_bytes` that left the host of rank 0
        in a call (of "mpi" the least that must), `wire_bytes` that all ranks sent. Of what has a
        schedule the same as simulated: `predicted_ms`, `predicted_ratio`, `predicted_link_bytes`,
        and `other_place_ms`, were ranks dealt out the other way. And the network that was
        simulated: what is emulated, or what a ping-pong measured.

    Raises:
        InvalidInput: all ranks are on one host.
    """
    network = on.network or _measured(cluster)
    if on.network:  # whose messages the library would not send over it
        algorithms = [name for name in algorithms if name in ALLREDUCE]
    assert isinstance(network.hosts, tuple)  # for the type checker: both ways make it so
    size, hosts = cluster.workers, [list(group) for group in network.hosts]
    other = "node" if hosts == groups(size, len(hosts), "core") else "core"
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
        # On hosts that are pretended all memory is one host's: nothing has left it.
        row |= {"link_bytes": None if on.network else float(np.median(link))}
        if name in ALLREDUCE:
            own = found[name, nbytes]
            row |= {"predicted_ms": 1e3 * own.seconds, "predicted_link_bytes": _out(own, network)}
            row |= {"predicted_ratio": found[BASE, nbytes].seconds / own.seconds}
            row |= {"other_place_ms": 1e3 * _predicted(name, nbytes, size, apart).seconds}
        rows.append(row)
    return rows, network


def _timed(
    communicator: Communicator, cases: list[tuple[str, int, int]], repeats: int
) -> list[list[tuple[float, bool, float, float]]]:
    sums = Sums(communicator)
    return [[sums.case(*case) for case in cases] for _ in range(repeats)]


def _measured(cluster: Cluster) -> Network:
    """Return the network of these ranks, measured by ping-pong between two hosts and inside one."""
    hosts = sorted({tuple(each) for each in cluster.call(_here)})
    if len(hosts) < 2:
        raise InvalidInput(
            f"all {cluster.workers} ranks are on one host: give more workers, or place='node'"
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
    """Simulate an algorithm; one without a schedule counts as the ring."""
    return simulate(name if name in ALLREDUCE else BASE, size, nbytes, network)


def _out(found: Simulation, network: Network) -> float:
    """Return the bytes that leave the first host."""
    return float(found.occupied[found.links.index("host 0 out")] * network.bandwidth)


def ways(communicator: Communicator) -> dict[str, float]:
    """Measure the links of rank 0, to another host and inside its own (collective)."""
    here = communicator.share(communicator.board.ranks)
    apart = [rank for rank in range(communicator.size) if rank not in here]
    found = {"payload": float(PAYLOAD)}
    for others, before in ((apart, ""), (here[1:], "inside_")):
        if others:
            latency = trip(communicator, others[0], 1, PINGS)
            whole = trip(communicator, others[0], LARGE, FEW)
            found |= {f"{before}latency": latency, f"{before}bandwidth": LARGE / (whole - latency)}
    return found


def trip(communicator: Communicator, other: int, nbytes: int, pings: int) -> float:
    """Return half the median round trip from rank 0 to another rank, s (collective)."""
    seconds, clock, data = [], communicator.clock, np.zeros(nbytes, np.uint8)
    communicator.meet()
    for _ in range(pings if communicator.rank in (0, other) else 0):
        start = clock.now()
        if communicator.rank == 0:
            communicator.send(data, other)
            communicator.recv(data, other)
        else:
            communicator.recv(data, 0)
            communicator.send(data, 0)
        seconds.append(clock.now() - start)
    return float(np.median(communicator.share(seconds))) / 2


class Sums:
    """A timer of allreduces, whose buffers stay for the next case."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: dict[int, np.ndarray] = {}

    def case(self, algorithm: str, nbytes: int, calls: int) -> tuple[float, bool, float, float]:
        """Return the median in s, whether sums are right, and the bytes of a call.

        Bytes are those that left the host of rank 0, and those that all ranks sent.
        """
        ranks = self._communicator
        if nbytes not in self._buffers:
            self._buffers[nbytes] = ranks.allocate(nbytes // 4)
        before, buffer = ranks.traffic.copy(), self._buffers[nbytes]
        right = check(ranks, algorithm, buffer)
        seconds = timed(ranks, algorithm, buffer, calls)
        sent = ranks.allgather(ranks.traffic.since(before))
        left = sum(sent[rank].link_bytes for rank in ranks.board.ranks)
        every = sum(each.wire_bytes for each in sent)
        # That of the check, too.
        return float(np.median(seconds)), right, left / (calls + 1), every / (calls + 1)
