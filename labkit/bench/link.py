"""A comparison of the emulated network with a real link of equal rate and latency.

The comparison measures allreduces, and pairs of messages that share the link. The module is also
the program of the two ranks on the real link. The two ranks send two flows over the real link.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click
import numpy as np

from labkit.bench.command import AS_JSON, format_rows, sizes, write_rows
from labkit.bench.linked_ranks import LEAD, LinkedProcesses, RankPair, connections, linked_ranks
from labkit.bench.timing import Row, head, sweep
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.nearest import refuse_unknown
from labkit.common.quantities import bits_of
from labkit.common.terminal import say
from labkit.communicator.clock import WALL
from labkit.frameworks.namespaces import FRAME, burst, class_of, require_tools
from labkit.network import Network, finish_times
from labkit.schedules import ALLREDUCE
from labkit.simulate import closed_form

if TYPE_CHECKING:
    from labkit.communicator import Communicator

KIB = 2**10
SIZES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
ALGORITHMS = ("ring", "master_worker")
RATES = ("100Mb", "1Gb")
Joined: TypeAlias = Callable[[int], AbstractContextManager[LinkedProcesses]]
BY_TCP: Joined = partial(linked_ranks, program="labkit.bench.linked_ranks")
# In one repeat, each algorithm runs for SLICE seconds with each buffer size.
SLICE = 0.5

# A case consists of an algorithm, a buffer size in bytes, and a number of calls.
SumCase: TypeAlias = tuple[str, int, int]
# Each case in FLOWS contains the sizes of two network flows in bytes. Each case in FLOWS also
# contains the delay of the second flow. The delay of the second flow is a share of the time that
# the first flow takes alone.
FLOWS = ((2**22, 2**22, 0.0), (2**22, 2**20, 0.0), (2**22, 2**21, 0.5))
# The constant WINDOW limits the bytes in flight on a TCP connection. The TCP window is several
# times the link's bandwidth-delay product, but much smaller than a message.
WINDOW = 2**16
CLAMP = 10  # Python does not define the number of Linux's socket option TCP_WINDOW_CLAMP.


def measure(
    rates: Sequence[str] = RATES,
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] = ALGORITHMS,
    repeats: int = 5,
    joined: Joined = BY_TCP,
) -> list[Row]:
    """Measure float32 allreduces of two ranks in turn on a real link and on its emulation.

    The real link connects two network namespaces of this machine through `tbf` queues. Two
    processes at the ends of the real link execute the same schedules over TCP. The latency of the
    emulated network is half the round-trip time of one byte. The median round-trip time is measured
    on the real link. The emulated network also has the payload rate of the real link. A full
    Ethernet frame of 1514 bytes carries 1448 bytes of TCP payload.

    Args:
        rates: Rates of the link in bits/s per direction, such as "100Mb" or "1Gb".
        sizes: Buffer sizes in bytes.
        algorithms: Names of allreduce algorithms in `labkit.schedules.ALLREDUCE`.
        repeats: Number of repeats. Each repeat measures both links with all algorithms and sizes,
            and gives one median for each combination.
        joined: Function that creates a link with a given rate in bits/s. `joined` returns a context
            manager that starts two ranks on a link. The link between the two ranks has the given
            rate. By default, `joined` uses the program `labkit.bench.linked_ranks`.

    Returns:
        One row per rate, algorithm and size. A row contains median, minimum and maximum of the
        repeats' medians. The field `median_ms` describes the real link, and `emulated_ms` describes
        the emulated link. It also contains the time by the closed formula. Each row also contains
        `error`, with its minimum and maximum over the repeats. `error` is the emulated time divided
        by the real time, minus 1. Each row also contains `correct` and the properties of the link.

    Raises:
        InvalidInput: A rate, size or algorithm is invalid.
        LabkitError: The process is not root, iproute2 is missing, or the kernel lacks a module.
    """
    bits = {rate: bits_of(rate) for rate in rates}
    refuse_unknown("algorithm", algorithms, ALLREDUCE)
    if min(sizes, default=0) < 4 or repeats < 1:
        raise InvalidInput(
            f"bytes={sizes}, repeats={repeats}: give sizes of at least 4 bytes, and at least 1 "
            "repeat"
        )
    wanted = [(algorithm, nbytes) for nbytes in sizes for algorithm in algorithms]
    require_tools()
    with Cluster(workers=2) as cluster:
        return [
            row
            for rate in rates
            for row in _sums_at(rate, bits[rate], cluster, wanted, repeats, joined)
        ]


def _sums_at(
    rate: str,
    bits: int,
    cluster: Cluster,
    wanted: list[tuple[str, int]],
    repeats: int,
    joined: Joined,
) -> list[Row]:
    """Return the rows of all algorithms and sizes at one rate of the link."""
    with joined(bits) as ranks:
        link: dict[str, float] = json.loads(ranks.answer())
        network = Network(
            latency=link["latency"], bandwidth=bits / 8 * link["payload"] / FRAME, name=rate
        )
        forms = [closed_form(algorithm, 2, nbytes, network) for algorithm, nbytes in wanted]
        cases: list[SumCase] = [
            (algorithm, nbytes, int(np.clip(SLICE / form, 3, 50)))
            for (algorithm, nbytes), form in zip(wanted, forms, strict=True)
        ]
        real, emulated = [], []
        for _ in range(repeats):
            ranks.ask(cases)
            real.append([result[:2] for result in json.loads(ranks.answer())])
            emulated.append(cluster.call(sweep, cases, network=network)[0])
    free = burst(bits)
    facts: Row = {"rate": rate, "burst": free, "burst_ms": 8e3 * free / bits, **link}
    # The axes of the array `times` are the link, the repeat, the case, and the pair (seconds,
    # correct).
    times = np.array([real, emulated])
    return [
        _row(case, form, times[:, :, number], rate, facts)
        for number, (case, form) in enumerate(zip(cases, forms, strict=True))
    ]


def _row(case: SumCase, form: float, times: np.ndarray, rate: str, facts: Row) -> Row:
    algorithm, nbytes, calls = case
    real, emulated = 1e3 * times[:, :, 0]
    errors = emulated / real - 1
    name, network = f"{algorithm} {nbytes} bytes at {rate}", f"{rate} between two namespaces"
    row = head("link", name, "allreduce", 2, network, repeats=times.shape[1], bytes=nbytes)
    return row | {
        "algorithm": algorithm,
        "median_ms": float(np.median(real)),
        "min_ms": float(real.min()),
        "p90_ms": float(np.percentile(real, 90)),
        "max_ms": float(real.max()),
        "emulated_ms": float(np.median(emulated)),
        "emulated_min_ms": float(emulated.min()),
        "emulated_max_ms": float(emulated.max()),
        "closed_form_ms": 1e3 * form,
        "error": float(np.median(emulated) / np.median(real) - 1),
        "error_min": float(errors.min()),
        "error_max": float(errors.max()),
        "calls": calls * times.shape[1],
        "correct": bool(times[:, :, 1].all()),
        **facts,
    }


@click.command("link")
@click.option(
    "--rate",
    default="100Mb,1Gb",
    show_default=True,
    help="Rates of the link in bits/s, separated by commas.",
)
@click.option(
    "--algorithms", default="ring,master_worker", show_default=True, help="Allreduce algorithms."
)
@click.option(
    "--bytes", "sizes", default="64KiB,256KiB,1MiB,4MiB", callback=sizes, help="Buffer sizes."
)
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats.")
@AS_JSON
def command(
    rate: str,
    algorithms: str,
    sizes: list[int],
    repeats: int,
    file: Path | None,
) -> None:
    """Compare the emulated network with a real rate-limited link (Linux, root, iproute2)."""
    rows = measure(rate.split(","), sizes, algorithms.split(","), repeats)
    # The command prints one line per link rate, because all rows of a rate share one link.
    for facts in {row["rate"]: row for row in rows}.values():
        say(
            f"{facts['rate']}: latency {1e6 * float(facts['latency'] or 0):.0f} us (measured); "
            f"each frame of {FRAME} bytes carries {facts['payload']} bytes of payload; after a "
            f"pause, the first {facts['burst']} bytes pass without rate limit, which saves "
            f"{facts['burst_ms']:.2g} ms"
        )
    columns = {name: name for name in ("rate", "algorithm", "bytes")}
    for kind, words in (("", "real ms"), ("emulated_", "emulated ms")):
        columns |= {f"{kind}ms" if kind else "median_ms": words}
        columns |= {f"{kind}min_ms": "min ms", f"{kind}max_ms": "max ms"}
    columns |= {"closed_form_ms": "formula ms", "error": "error", "correct": "correct"}
    say(format_rows(rows, columns))
    both = measure_flows(rate.split(","), repeats)
    columns = {"flow": "concurrent flow", "rate": "rate", "median_ms": "real ms"}
    columns |= {"min_ms": "min ms", "max_ms": "max ms", "emulated_ms": "emulated ms"}
    say(format_rows(both, columns | {"max_min_ms": "max-min ms", "error": "error"}))
    write_rows([*rows, *both], file)


# A `FlowCase` contains the sizes of two network flows in bytes. A `FlowCase` also contains the
# delay of the second flow in seconds.
FlowCase = tuple[int, int, float]


def measure_flows(rates: Sequence[str], repeats: int = 5) -> list[Row]:
    """Measure two concurrent messages between two ranks, on a real link and on its emulation.

    The two flows use two TCP connections. A queue of the real link sends packets of the two
    connections in turn (see `rate_limited_link`).

    Args:
        rates: Rates of the link in bits/s, such as "100Mb".
        repeats: Number of rounds over both links and all cases.

    Returns: One row per rate, case and flow. The time of a row begins with the start of the first
        flow. The time of a row ends with the end of the row's flow.

    Raises:
        InvalidInput: A rate is invalid.
        LabkitError: The link cannot be set up, see `rate_limited_link`.
    """
    bits = {rate: bits_of(rate) for rate in rates}
    if repeats < 1:
        raise InvalidInput(f"repeats={repeats} is too small; give 1 or more")
    require_tools()
    with Cluster(workers=2) as cluster:
        return [row for rate in rates for row in _flows_at(rate, bits[rate], cluster, repeats)]


def _flows_at(rate: str, bits: int, cluster: Cluster, repeats: int) -> list[Row]:
    """Return the rows of all cases at one rate of the link."""
    with linked_ranks(bits, "labkit.bench.link", flows=2) as ranks:
        link: dict[str, float] = json.loads(ranks.answer())
        speed = bits / 8 * link["payload"] / FRAME
        network = Network(latency=link["latency"], bandwidth=speed, name=rate)
        cases = [(first, second, share * first / speed) for first, second, share in FLOWS]
        real, emulated = [], []
        for _ in range(repeats):
            ranks.ask(cases)
            real.append(json.loads(ranks.answer()))
            emulated.append(cluster.call(both, cases, network=network)[1])
    # The array `times` contains milliseconds; its axes are the link, the repeat, the case and the
    # flow.
    times = 1e3 * np.array([real, emulated])
    rows = []
    for number, case in enumerate(cases):
        *sizes, later = case
        by_hand = finish_times([[0], [0]], sizes, [0.0, later], [speed]) + link["latency"]
        for flow in (0, 1):
            one, other = times[:, :, number, flow]
            name = (
                f"flow {flow + 1} of two ({sizes[0]} and {sizes[1]} bytes, the second "
                f"{1e3 * later:.0f} ms later)"
            )
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


def both(communicator: Communicator, cases: Sequence[FlowCase]) -> list[list[float]]:
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
            # The rank receives the second flow first, because the second flow ends no later than
            # the first flow.
            communicator.recv(data[1], 0, 1)
            ends[1] = clock.now() - start
            communicator.recv(data[0], 0, 0)
            ends[0] = clock.now() - start
        found.append(ends)
    return found


def _case(rank: RankPair, flows: list[socket.socket], case: FlowCase) -> list[float]:
    """Send a case's flows from rank 1 to rank 0; return the seconds until each flow ends."""
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
    """Run the cases of each line of stdin: `python -m labkit.bench.link RANK ADDRESS`."""
    rank, address = int(sys.argv[1]), sys.argv[2]
    control, *flows = connections(rank, address, 3)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for number, flow in enumerate(flows):
        flow.setsockopt(socket.IPPROTO_TCP, CLAMP, WINDOW)
        flow.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, class_of(number))
    pair = RankPair(control, rank)
    # Before the timed messages, untimed messages enlarge the TCP congestion windows.
    for _ in range(2):
        _case(pair, flows, (2**21, 2**21, 0.0))
    payload = control.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    print(json.dumps({"latency": pair.latency(), "payload": payload}), flush=True)
    for line in sys.stdin:
        found = [_case(pair, flows, case) for case in json.loads(line)]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
