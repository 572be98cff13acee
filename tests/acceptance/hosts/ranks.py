"""Ranks on the hosts of a testbed, which time the allreduces that a campaign asks for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from labkit.bench.host_allreduce import Sums, ways
from labkit.bench.linked_processes import LinkedProcesses, started
from labkit.communicator import launcher, world
from labkit.hosts import Testbed
from labkit.hosts.scripts import AGENT_VARIABLE
from tests.acceptance.repository import EXPORT_PATH

LIMIT = 3600.0  # s between two questions
# Reno opens its window until something is lost, and here nothing is: the link alone decides. A
# connection that has paused does not start slowly again.
RENO = "cd /proc/sys/net/ipv4 && echo reno > tcp_congestion_control && "
RENO += "echo 0 > tcp_slow_start_after_idle"


@contextmanager
def ranks_on(bed: Testbed, each: int) -> Iterator[LinkedProcesses]:
    """Start some ranks on each host, placed by node; they speak through rank 0.

    They first report the links between them: `latency` (s), `bandwidth` (bytes/s) and
    `payload` (bytes of a frame) between hosts, `inside_latency` and `inside_bandwidth` where a
    host has two ranks. To a list of (algorithm, bytes, calls) they answer as `Sums.case`, for each.
    """
    at = ",".join(f"{host}:{each}" for host in bed.hosts)
    started_by = [*launcher.mpiexec(each * len(bed.hosts)), *EXPORT_PATH]
    started_by += ["--prtemca", "plm", "ssh", "--host", at]
    variables = os.environ | launcher.environment(over_hosts=True)
    variables |= {AGENT_VARIABLE: str(bed.agent), "OMPI_MCA_btl_tcp_if_include": bed.network}
    for host in bed.hosts:  # as far as it may be set: /proc is read-only in some containers
        bed.run(host, ["sh", "-c", RENO])
    # Of mpi4py, which ends all ranks with the one that fails.
    command = [*started_by, sys.executable, "-P", "-m", "mpi4py", "-m", __name__]
    with started([bed.command("login", command)], variables) as ranks:
        yield ranks


def main() -> None:
    """`python -m tests.acceptance.hosts.ranks`: cases from stdin, a line each, results out."""
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
