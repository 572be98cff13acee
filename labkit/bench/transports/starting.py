"""Pairs of processes, started where the way between them is the one that is to be timed."""

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

from labkit.bench.linked_processes import Ranks, started
from labkit.bench.transports.ways import LOOPBACK, UNATTACHED, WITHIN
from labkit.communicator import launcher
from labkit.frameworks.child import FOREIGN, computing
from labkit.frameworks.namespaces import ADDRESSES, DEVICE, inside
from labkit.frameworks.private_network import isolate, private_network
from labkit.frameworks.tf_config import HERE, PORT, free_ports

HOSTS = ("labkit-a", "labkit-b")  # names of two hosts on this machine
_RANK = "labkit.bench.transports.rank"
_TASK = "labkit.bench.transports.task"
# Those of Open MPI's parts that read the memory of another process are left out.
_UNATTACHED = {"OMPI_MCA_smsc": "^cma,knem,xpmem"}
# Open MPI's daemons meet by no address of loopback: in a network of their own they have another.
_DEVICE = (
    f"ip link add {DEVICE} type veth peer name other && ip link set other up && "
    f"ip address add {ADDRESSES[0]}/30 dev {DEVICE} && ip link set {DEVICE} up && "
    'exec "$0" "$@"'
)
# Open MPI's parts that speak TCP alone.
_TCP = {"pml": "ob1", "btl": "tcp,self", "osc": "^ucx", "mpi_yield_when_idle": "1"}


@contextmanager
def ranks(place: str, namespaces: tuple[str, str] | None = None) -> Iterator[Ranks]:
    """Two MPI ranks, in a place of `labkit.bench.transports.ways.PLACES`.

    Over TCP each rank is on a host of its own, as far as Open MPI can tell: two ranks of one host
    would share the memory of a window, whichever network is asked for.

    Args:
        place: where.
        namespaces: of the network, at whose ends they are.

    Raises:
        LabkitError: they ended early; with what they said last.
    """
    # Of mpi4py, which ends all ranks with the one that fails.
    rank = [sys.executable, "-P", "-m", "mpi4py", "-m", _RANK]
    variables = dict(os.environ) | launcher.environment()
    if place == UNATTACHED:
        variables |= _UNATTACHED
    if place in WITHIN:
        command = [*isolate("mpiexec"), *launcher.mpiexec(2), *rank]
        with started([command], variables) as found:
            yield found
        return
    device = "lo" if place == LOOPBACK else DEVICE
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_agent(dict(zip(HOSTS, namespaces, strict=True)) if namespaces else {}))
        agent.chmod(0o700)
        variables["PRTE_MCA_plm_ssh_agent"] = str(agent)
        del variables["OMPI_MCA_btl"], variables["OMPI_MCA_osc"]  # said anew
        said = (_TCP | {"btl_tcp_if_include": device}).items()
        command = [*launcher.mpiexec(2), "--prtemca", "plm", "ssh"]
        command += ["--host", ",".join(f"{host}:1" for host in HOSTS)]
        command += [word for name, value in said for word in ("--mca", name, value)]
        words = inside(namespaces[0]) if namespaces else _alone_with_a_device()
        with started([[*words, *command, *rank]], variables) as found:
            yield found


@contextmanager
def tasks(namespaces: tuple[str, str] | None = None) -> Iterator[Ranks]:
    """Two tasks of TensorFlow, joined by gRPC on loopback or between namespaces."""
    if namespaces:
        addresses = [f"{address}:{PORT}" for address in ADDRESSES]
    else:
        addresses = [f"{HERE}:{port}" for port in free_ports(2)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    unproxied = {"no_proxy": ",".join((HERE, "localhost", *ADDRESSES))}
    given = variables | computing(1) | launcher.huge_pages() | unproxied
    with ExitStack() as opened:
        words: list[Sequence[str]]
        if namespaces:
            words = [inside(name) for name in namespaces]
        else:
            words = [opened.enter_context(private_network("TensorFlow's tasks"))] * 2
        commands = [
            [*each, sys.executable, "-P", "-m", _TASK, str(number), *addresses]
            for number, each in enumerate(words)
        ]
        yield opened.enter_context(started(commands, given))


def hosts_wanted() -> str:
    """Why this machine cannot seem to be two hosts; empty where it can."""
    for name, package in (("unshare", "util-linux"), ("ip", "iproute2")):
        if shutil.which(name) is None:
            return f"two hosts on one machine want {name}, of {package}, which is not on PATH"
    done = subprocess.run([*_alone(), "true"], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip() or f"exit code {done.returncode}"
    return f"two hosts on one machine want a UTS namespace, which unshare refuses: {said}"


def _alone_with_a_device() -> list[str]:
    """The words before an mpiexec of several hosts that has a network to itself."""
    words = isolate("mpiexec")
    return [*words, "sh", "-c", _DEVICE] if words else []


def _alone() -> list[str]:
    """The words before a command that gets a host name of its own."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--uts"]


def _agent(namespaces: Mapping[str, str]) -> str:
    """What Open MPI calls in place of SSH: options, the name of a host, and a command for it."""
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
