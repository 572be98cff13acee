"""The start of the two processes of a transport benchmark, in each supported place."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from labkit.bench.linked_ranks import LinkedProcesses, started
from labkit.bench.transports.ways import LOOPBACK, UNATTACHED, WITHIN
from labkit.communicator import launcher
from labkit.frameworks.child import computing, outside_mpi
from labkit.frameworks.namespaces import ADDRESSES, DEVICE, command_prefix, isolate, private_network
from labkit.frameworks.tf_config import LOOPBACK_ADDRESS, PORT, free_ports

HOSTS = ("labkit-a", "labkit-b")  # names of two emulated hosts on this machine
_PROCESS = "labkit.bench.transports.process"
# `OMPI_MCA_smsc` excludes those components of Open MPI that read the memory of another process.
_UNATTACHED = {"OMPI_MCA_smsc": "^cma,knem,xpmem"}
# Open MPI's daemons do not use loopback addresses, so their network namespace gets an additional
# network device.
_DEVICE = (
    f"ip link add {DEVICE} type veth peer name other && ip link set other up && "
    f"ip address add {ADDRESSES[0]}/30 dev {DEVICE} && ip link set {DEVICE} up && "
    'exec "$0" "$@"'
)
# The Open MPI parameters in `_TCP` restrict Open MPI to components that use TCP.
_TCP = {"pml": "ob1", "btl": "tcp,self", "osc": "^ucx", "mpi_yield_when_idle": "1"}


@contextmanager
def ranks(place: str, namespaces: tuple[str, str] | None = None) -> Iterator[LinkedProcesses]:
    """Start two MPI ranks in one of the places `labkit.bench.transports.ways.PLACES`.

    For TCP, each rank gets a different host name. If both ranks had the same host name, Open MPI
    would let them share the memory of a window regardless of the network.

    Args:
        place: Where the two ranks run and communicate, such as "TCP on loopback".
        namespaces: Network namespaces of the two ranks; None: the ranks communicate over loopback
            or within one host.

    Raises:
        LabkitError: The ranks ended early; the message contains their last lines of output.
    """
    # With `-m mpi4py`, all ranks abort when one rank fails.
    rank = [sys.executable, "-P", "-m", "mpi4py", "-m", _PROCESS]
    variables = dict(os.environ) | launcher.environment()
    if place == UNATTACHED:
        variables |= _UNATTACHED
    if place in WITHIN:
        command = [*isolate("mpiexec"), *launcher.mpiexec(2), *rank]
        with started([command], variables) as processes:
            yield processes
        return
    device = "lo" if place == LOOPBACK else DEVICE
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_agent(dict(zip(HOSTS, namespaces, strict=True)) if namespaces else {}))
        agent.chmod(0o700)
        variables["PRTE_MCA_plm_ssh_agent"] = str(agent)
        # Command-line options set `btl` and `osc` to the values that the place requires.
        del variables["OMPI_MCA_btl"], variables["OMPI_MCA_osc"]
        options = (_TCP | {"btl_tcp_if_include": device}).items()
        command = [*launcher.mpiexec(2), "--prtemca", "plm", "ssh"]
        command += ["--host", ",".join(f"{host}:1" for host in HOSTS)]
        command += [word for name, value in options for word in ("--mca", name, value)]
        words = command_prefix(namespaces[0]) if namespaces else _alone_with_a_device()
        with started([[*words, *command, *rank]], variables) as processes:
            yield processes


@contextmanager
def tasks(namespaces: tuple[str, str] | None = None) -> Iterator[LinkedProcesses]:
    """Start two TensorFlow tasks, which gRPC connects over loopback or between namespaces."""
    if namespaces:
        addresses = [f"{address}:{PORT}" for address in ADDRESSES]
    else:
        addresses = [f"{LOOPBACK_ADDRESS}:{port}" for port in free_ports(2)]
    unproxied = {"no_proxy": ",".join((LOOPBACK_ADDRESS, "localhost", *ADDRESSES))}
    environment = outside_mpi(sys.executable) | computing(1) | launcher.huge_pages() | unproxied
    with ExitStack() as opened:
        words: list[Sequence[str]]
        if namespaces:
            words = [command_prefix(name) for name in namespaces]
        else:
            words = [opened.enter_context(private_network("TensorFlow's tasks"))] * 2
        commands = [
            [*each, sys.executable, "-P", "-m", _PROCESS, str(number), *addresses]
            for number, each in enumerate(words)
        ]
        yield opened.enter_context(started(commands, environment))


def hosts_wanted() -> str:
    """Return why this machine cannot emulate two hosts; "" if it can."""
    for name, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if shutil.which(name) is None:
            return (
                f"the emulation of two hosts requires {name} of the package {package}, which is "
                "not on PATH"
            )
    done = subprocess.run([*_alone(), "true"], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    reason = done.stderr.strip() or f"exit code {done.returncode}"
    return f"the emulation of two hosts requires a UTS namespace, which unshare refuses: {reason}"


def _alone_with_a_device() -> list[str]:
    """Return the command prefix that runs mpiexec in a network namespace with a network device."""
    words = isolate("mpiexec")
    return [*words, "sh", "-c", _DEVICE] if words else []


def _alone() -> list[str]:
    """Return the command prefix that gives a command a separate host name."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--uts"]


def _agent(namespaces: Mapping[str, str]) -> str:
    """Return a script that replaces ssh for Open MPI; arguments: options, host name, command."""
    enters = "\n".join(
        f'{host}) set -- nsenter --net=/run/netns/{shlex.quote(namespace)} "$@" ;;'
        for host, namespace in namespaces.items()
    )
    return f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
command=$*
set -- {shlex.join(_alone())} sh -c "hostname $host; $command"
case $host in
{enters}
esac
exec "$@"
"""
