"""Ranks on the hosts of a testbed, that answer a benchmark's questions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from labkit.bench.joined import Ranks, started
from labkit.bench.timing import check, timed
from labkit.communicator import Communicator, launcher, world
from labkit.frameworks.namespaces import FRAME
from labkit.hosts import Testbed
from labkit.hosts.scripts import AGENT_VARIABLE

LIMIT = 3600.0  # s between two questions
PAYLOAD = 1448  # bytes of a full frame that are TCP's: without headers and its time stamp
LARGE = 2**22  # bytes, whose way is timed
PINGS, FEW = 200, 20  # of one byte, and of many
# Reno opens its window until something is lost, and here nothing is: the link alone decides. A
# connection that has paused does not start slowly again.
RENO = "cd /proc/sys/net/ipv4 && echo reno > tcp_congestion_control && "
RENO += "echo 0 > tcp_slow_start_after_idle"


@contextmanager
def ranks_on(bed: Testbed, each: int) -> Iterator[Ranks]:
    """So many ranks on each host, placed by node; they speak through rank 0.

    They first say what the ways between them are: `latency` (s), `bandwidth` (bytes/s) and
    `payload` (bytes of a frame) between hosts, `inside_latency` and `inside_bandwidth` where a
    host has two ranks. To a list of (algorithm, bytes, calls) they answer as `Sums.case`, for each.
    """
    at = ",".join(f"{host}:{each}" for host in bed.hosts)
    started_by = [*launcher.mpiexec(each * len(bed.hosts)), "--prtemca", "plm", "ssh", "--host", at]
    variables = os.environ | launcher.environment(over_hosts=True)
    variables |= {AGENT_VARIABLE: str(bed.agent), "OMPI_MCA_btl_tcp_if_include": bed.network}
    for host in bed.hosts:  # as far as it may be set: /proc is read-only in some containers
        bed.run(host, ["sh", "-c", RENO])
    # Of mpi4py, which ends all ranks with the one that fails.
    command = [*started_by, sys.executable, "-P", "-m", "mpi4py", "-m", __name__]
    with started([bed.command("login", command)], variables) as ranks:
        yield ranks


def share_of(bits: int) -> float:
    """Bytes/s of payload on a link of so many bits/s."""
    return bits / 8 * PAYLOAD / FRAME


def ways(communicator: Communicator) -> dict[str, float]:
    """What the ways between ranks are, to another host and inside that of rank 0 (collective)."""
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
    """Half the median round trip from rank 0 to another rank, s (collective)."""
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
    """Times sums, in memory that stays for the next question."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: dict[int, np.ndarray] = {}

    def case(self, algorithm: str, nbytes: int, calls: int) -> tuple[float, bool, float, float]:
        """The median in s, whether sums are right, and bytes in a call.

        These are what left the host of rank 0, and what all ranks sent.
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


def main() -> None:
    """`python -m labkit.bench.hosts.ranks`: cases from stdin, a line each, results out."""
    communicator = world(limit=LIMIT)
    speaks = communicator.rank == 0
    if speaks:
        print("ready", flush=True)
        sys.stdin.readline()
    found, sums = ways(communicator), Sums(communicator)
    if speaks:
        print(json.dumps(found), flush=True)
    while line := communicator.share(sys.stdin.readline() if speaks else None):
        answer = [sums.case(*case) for case in json.loads(line)]
        if speaks:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
