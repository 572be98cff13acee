"""Checks of remote hosts: all have the same Python, and their ranks can form one MPI world."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence

from labkit.cli.doctor.diagnosis import Diagnosis, output
from labkit.cli.doctor.ranks import RANK, rank_reports, trouble
from labkit.common.units import plural
from labkit.communicator import launcher
from labkit.hosts import connection
from labkit.hosts.host_list import Host
from labkit.hosts.host_probe import probe
from labkit.hosts.scripts import AGENT_VARIABLE


def hosts(listed: Sequence[Host]) -> Iterator[Diagnosis]:
    """Check each host, then start one MPI world with all ranks that `listed` assigns to hosts."""
    agent = connection.agent()
    results = probe([host.name for host in listed], agent)
    for host, wrong in results:
        if wrong:
            command_line = shlex.join([*agent, host, sys.executable, "--version"])
            yield Diagnosis("broken", f"hosts: {wrong}", command_line)
        else:
            yield Diagnosis(
                "ok",
                f"hosts: {host} has the same versions of Python, labkit and MPI as this machine",
            )
    if any(result.trouble for result in results):
        return
    count = sum(host.slots for host in listed)
    host_list = ",".join(map(str, listed))
    command = [
        *connection.login(),
        *launcher.mpiexec(count),
        "--prtemca",
        "plm",
        "ssh",
        "--host",
        host_list,
    ]
    done = output(
        [*command, sys.executable, "-P", "-c", RANK],
        launcher.environment(over_hosts=True) | {AGENT_VARIABLE: shlex.join(agent)},
    )
    if wrong := trouble(done, count):
        fix = "name the network that all hosts share: export OMPI_MCA_btl_tcp_if_include=10.0.0.0/8"
        yield Diagnosis("broken", f"world: {wrong}", fix)
        return
    names = sorted({rank["host"] for rank in rank_reports(done)})
    yield Diagnosis(
        "ok", f"world: {plural(count, 'rank')} formed one MPI_COMM_WORLD on {', '.join(names)}"
    )
