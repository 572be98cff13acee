"""Ranks on the hosts of a testbed; they time allreduces for a campaign."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from labkit.bench.host_allreduce import Sums, ways
from labkit.bench.linked_ranks import LinkedProcesses, started
from labkit.communicator import launcher, world
from labkit.hosts import Testbed
from labkit.hosts.scripts import AGENT_VARIABLE
from tests.acceptance.repository import EXPORT_PATH

LIMIT = 3600.0  # timeout between two requests, seconds
# The congestion control Reno enlarges its window until a packet is lost. No packet is lost on this
# link, so the link alone limits the speed. After a pause, a connection continues without a slow
# start.
RENO = "cd /proc/sys/net/ipv4 && echo reno > tcp_congestion_control && "
RENO += "echo 0 > tcp_slow_start_after_idle"


@contextmanager
def ranks_on(bed: Testbed, each: int) -> Iterator[LinkedProcesses]:
    """Start ranks on each host, placed by node; rank 0 reads requests and writes results.

    The ranks first report the links: `latency` (s), `bandwidth` (bytes/s) and `payload` (bytes of a
    frame) between hosts, and `inside_latency` and `inside_bandwidth` if a host has two ranks. The
    caller then sends lists of tuples (algorithm, bytes, calls); for each tuple, the ranks return
    the result of `Sums.case`.
    """
    at = ",".join(f"{host}:{each}" for host in bed.hosts)
    started_by = [*launcher.mpiexec(each * len(bed.hosts)), *EXPORT_PATH]
    started_by += ["--prtemca", "plm", "ssh", "--host", at]
    variables = os.environ | launcher.environment(over_hosts=True)
    variables |= {AGENT_VARIABLE: str(bed.agent), "OMPI_MCA_btl_tcp_if_include": bed.network}
    for host in bed.hosts:  # some containers do not allow this: their /proc is read-only
        bed.run(host, ["sh", "-c", RENO])
    # With `-m mpi4py`, the failure of one rank ends all ranks.
    command = [*started_by, sys.executable, "-P", "-m", "mpi4py", "-m", __name__]
    with started([bed.command("login", command)], variables) as ranks:
        yield ranks


def main() -> None:
    """Read lists of cases from stdin, one list per line, and print their results."""
    communicator = world(timeout=LIMIT)
    speaks = communicator.rank == 0
    if speaks:
        print("ready", flush=True)
        sys.stdin.readline()
    found, sums = ways(communicator), Sums(communicator)
    if speaks:
        print(json.dumps(found), flush=True)
    while line := communicator.broadcast_object(sys.stdin.readline() if speaks else None):
        answer = [sums.case(*case) for case in json.loads(line)]
        if speaks:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
