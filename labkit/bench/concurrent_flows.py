"""A benchmark of two concurrent flows (messages) on a real link and on its emulation."""

from __future__ import annotations

import json
import selectors
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from labkit.bench.linked_ranks import LEAD, RankPair, connections, linked_ranks
from labkit.bench.timing import Row, head
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.quantities import bits_of
from labkit.communicator.clock import WALL
from labkit.frameworks.namespaces import FRAME, class_of, require_tools
from labkit.network import Network, finish_times

if TYPE_CHECKING:
    from labkit.communicator import Communicator

# Each case has the bytes of both flows, and the delay of the second flow as a share of the time
# that the first flow takes alone.
CASES = ((2**22, 2**22, 0.0), (2**22, 2**20, 0.0), (2**22, 2**21, 0.5))
# The maximum number of bytes in flight on a connection is several times the link's bandwidth-delay
# product, but much less than a message.
WINDOW = 2**16
CLAMP = 10  # Linux's socket option TCP_WINDOW_CLAMP, which Python does not define

# Bytes of the first and the second flow; delay of the second flow (s).
Case = tuple[int, int, float]


def measure(rates: Sequence[str], repeats: int = 5) -> list[Row]:
    """Time two concurrent messages between two ranks, on a real link and on its emulation.

    The two flows use two TCP connections over the real link, whose queue serves both connections in
    turn (see `rate_limited_link`).

    Args:
        rates: Rates of the link in bits/s, such as "100Mb".
        repeats: Number of rounds over both links and all cases.

    Returns:
        One row per rate, case and flow, with the time from the start of the first flow to the end
        of the row's flow.

    Raises:
        InvalidInput: A rate is invalid.
        LabkitError: The link cannot be set up, see `rate_limited_link`.
    """
    bits = {rate: bits_of(rate) for rate in rates}
    if repeats < 1:
        raise InvalidInput(f"repeats={repeats}: give 1 or more")
    require_tools()
    with Cluster(workers=2) as cluster:
        return [row for rate in rates for row in _at(rate, bits[rate], cluster, repeats)]


def _at(rate: str, bits: int, cluster: Cluster, repeats: int) -> list[Row]:
    """Return the rows of all cases at one rate of the link."""
    with linked_ranks(bits, "labkit.bench.concurrent_flows", flows=2) as ranks:
        link: dict[str, float] = json.loads(ranks.answer())
        speed = bits / 8 * link["payload"] / FRAME
        network = Network(latency=link["latency"], bandwidth=speed, name=rate)
        cases = [(first, second, share * first / speed) for first, second, share in CASES]
        real, emulated = [], []
        for _ in range(repeats):
            ranks.ask(cases)
            real.append(json.loads(ranks.answer()))
            emulated.append(cluster.call(both, cases, network=network)[1])
    times = 1e3 * np.array([real, emulated])  # unit: ms; axes: link, repeat, case, flow
    rows = []
    for number, case in enumerate(cases):
        *sizes, later = case
        by_hand = finish_times([[0], [0]], sizes, [0.0, later], [speed]) + link["latency"]
        for flow in (0, 1):
            one, other = times[:, :, number, flow]
            name = f"flow {flow + 1} of {sizes[0]} and {sizes[1]} bytes, {1e3 * later:.0f} ms later"
            row = head("link", f"{name} at {rate}", "two flows", 2, rate, repeats=repeats)
            rows.append(
                row
                | {
                    "rate": rate,
                    "flow": name,
                    "bytes": sizes[flow],
                    "median_ms": float(np.median(one)),
                    "min_ms": float(one.min()),
                    "p90_ms": float(np.percentile(one, 90)),
                    "max_ms": float(one.max()),
                    "emulated_ms": float(np.median(other)),
                    "emulated_min_ms": float(other.min()),
                    "emulated_max_ms": float(other.max()),
                    "max_min_ms": 1e3 * float(by_hand[flow]),
                    "error": float(np.median(other) / np.median(one) - 1),
                    **link,
                }
            )
    return rows


def both(communicator: Communicator, cases: Sequence[Case]) -> list[list[float]]:
    """Return, for each case, the seconds until each flow from rank 0 ends (runs on ranks)."""
    found = []
    clock = communicator.clock
    for first, second, later in cases:
        data = [np.zeros(first, np.uint8), np.zeros(second, np.uint8)]
        communicator.barrier("two flows")
        start = max(communicator.allgather(clock.now())) + LEAD
        clock.sleep_until(start)
        ends = [0.0, 0.0]
        if communicator.rank == 0:
            posted = communicator.post(data[0], 1, 0)
            clock.sleep_until(start + later)
            posted += communicator.post(data[1], 1, 1)
            communicator.finish(posted)
        else:
            communicator.recv(data[1], 0, 1)  # the second flow never ends after the first flow
            ends[1] = clock.now() - start
            communicator.recv(data[0], 0, 0)
            ends[0] = clock.now() - start
        found.append(ends)
    return found


def _case(rank: RankPair, flows: list[socket.socket], case: Case) -> list[float]:
    """Return the seconds until each flow of a case, from rank 1 on the real link, ends."""
    first, second, later = case
    start = max(rank.allgather(WALL.now())) + LEAD

    def send(flow: socket.socket, nbytes: int, at: float) -> None:
        WALL.sleep_until(at)
        flow.sendall(bytes(nbytes))

    if rank.rank == 1:
        with ThreadPoolExecutor(2) as threads:
            moments = (start, start + later)
            list(threads.map(send, flows, (first, second), moments))
    found = [0.0, 0.0] if rank.rank else _ends(flows, [first, second], start)
    return rank.allgather(found)[0]


def _ends(flows: list[socket.socket], remaining: list[int], start: float) -> list[float]:
    """Return the seconds from the start to the arrival of each flow's last byte."""
    ends, room = [0.0] * len(flows), bytearray(2**20)
    with selectors.DefaultSelector() as ready:
        for number, flow in enumerate(flows):
            ready.register(flow, selectors.EVENT_READ, number)
        while any(remaining):
            for key, _ in ready.select():
                number = key.data
                received = flows[number].recv_into(room, min(len(room), remaining[number]))
                if not received:
                    raise LabkitError("the other rank closed the connection")
                remaining[number] -= received
                if remaining[number] == 0:
                    ends[number] = WALL.now() - start
                    ready.unregister(key.fileobj)
    return ends


def main() -> None:
    """Time the cases of each stdin line: `python -m labkit.bench.concurrent_flows RANK ADDRESS`."""
    rank, address = int(sys.argv[1]), sys.argv[2]
    control, *flows = connections(rank, address, 3)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for number, flow in enumerate(flows):
        flow.setsockopt(socket.IPPROTO_TCP, CLAMP, WINDOW)
        flow.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, class_of(number))
    pair = RankPair(control, rank)
    for _ in range(2):  # untimed messages grow the TCP congestion windows
        _case(pair, flows, (2**21, 2**21, 0.0))
    payload = control.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    print(json.dumps({"latency": pair.latency(), "payload": payload}), flush=True)
    for line in sys.stdin:
        found = [_case(pair, flows, case) for case in json.loads(line)]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
