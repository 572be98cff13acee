"""Hosts that an agent reaches: each has this Python, and all of them make one MPI world."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence

from labkit.cli.doctor.diagnosis import Finding, output
from labkit.cli.doctor.ranks import RANK, of_ranks, trouble
from labkit.common.units import plural
from labkit.communicator import launcher
from labkit.hosts import connection
from labkit.hosts.host_list import Host
from labkit.hosts.probe import probe
from labkit.hosts.scripts import AGENT_VARIABLE


def hosts(listed: Sequence[Host]) -> Iterator[Finding]:
    """Ask each host, then start as many ranks as all of them take."""
    agent = connection.agent()
    answers = probe([host.name for host in listed], agent)
    for host, wrong in answers:
        if wrong:
            tried = shlex.join([*agent, host, sys.executable, "--version"])
            yield Finding("broken", f"hosts: {wrong}", tried)
        else:
            yield Finding("ok", f"hosts: {host} has this Python, this labkit, this MPI")
    if any(answer.trouble for answer in answers):
        return
    count = sum(host.slots for host in listed)
    named = ",".join(map(str, listed))
    command = [
        *connection.login(),
        *launcher.mpiexec(count),
        "--prtemca",
        "plm",
        "ssh",
        "--host",
        named,
    ]
    done = output(
        [*command, sys.executable, "-P", "-c", RANK],
        launcher.environment(over_hosts=True) | {AGENT_VARIABLE: shlex.join(agent)},
    )
    if wrong := trouble(done, count):
        fix = "name the network that all share: export OMPI_MCA_btl_tcp_if_include=10.0.0.0/8"
        yield Finding("broken", f"world: {wrong}", fix)
        return
    there = sorted({rank["host"] for rank in of_ranks(done)})
    yield Finding("ok", f"world: {plural(count, 'rank')} met on {', '.join(there)}")
