"""The start of the two processes of a transport benchmark, in each supported place.

The benchmark's transports and places, their memory copies, and predicted times over RDMA.

The predictions need no measurements, so the machine needs no RDMA hardware. The link is labkit's
preset of 100 Gb/s InfiniBand. The paper that `predict` cites also measures on such a network.
"""

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
from typing import NamedTuple

from labkit.bench.linked_ranks import LinkedProcesses, started
from labkit.bench.timing import Row, head
from labkit.common.nearest import refuse_unknown
from labkit.communicator import launcher
from labkit.frameworks.child import computing, outside_mpi
from labkit.frameworks.namespaces import ADDRESSES, DEVICE, command_prefix, isolate, private_network
from labkit.frameworks.tf_config import LOOPBACK_ADDRESS, PORT, free_ports
from labkit.network import Network, finish_times

SHARED, LOOPBACK, APART = "shared memory", "TCP on loopback", "TCP between namespaces"
# In the measurement place UNATTACHED, Open MPI does not read another process's memory. Some Linux
# kernels forbid a process to read another process's memory (see ptrace(2)).
UNATTACHED = "shared memory, no attach"
# The constant WITHIN contains the places where both processes share the memory of one host.
WITHIN = (SHARED, UNATTACHED)
PLACES = (*WITHIN, LOOPBACK, APART)
GRPC = "grpc"

# TCP copies an array twice: into the sender's kernel and out of the receiver's kernel. On loopback,
# sender and receiver have the same kernel, which makes no further copy.
_WAYS_TCP = (
    "from the sender's memory into its kernel",
    "from the kernel into the receiver's memory",
)
# With Open MPI's active messages, the receiver's MPI library makes an additional copy of each
# fragment.
_FRAGMENTS = (*_WAYS_TCP, "from the received fragment into the MPI window")
# The lists in `_COPIES` name each copy that a transport makes, according to its source code. A gRPC
# sender does not copy a large tensor. A gRPC receiver copies a large tensor out of gRPC's slices.
# TensorFlow's files grpc_tensor_coding.cc and tensor_coding.cc in the folder
# tensorflow/core/distributed_runtime/rpc implement gRPC's copies.
_GRPC = (*_WAYS_TCP, "from gRPC's received slices into a tensor")
_STAGED = "from the sender's array into memory that the receiver may read"
_PUT = ("by the MPI put, which RDMA hardware executes without the CPU",)
_READ = (_STAGED, "by the MPI get, which RDMA hardware executes without the CPU")
_FETCHED = (_STAGED, *_WAYS_TCP, "from the received fragment into the destination array")
_COPIES = {
    (GRPC, LOOPBACK): _GRPC,
    (GRPC, APART): _GRPC,
    ("two_sided", SHARED): ("by the receiver's MPI library, out of the sender's memory",),
    ("two_sided", UNATTACHED): (
        "from the sender's memory into fragments of shared memory",
        "from fragments of shared memory into the receiver's memory",
    ),
    ("two_sided", LOOPBACK): _WAYS_TCP,
    ("two_sided", APART): _WAYS_TCP,
    ("one_sided", SHARED): _PUT,
    # A put into an MPI window works without reading another process's memory.
    ("one_sided", UNATTACHED): _PUT,
    ("one_sided", LOOPBACK): _FRAGMENTS,
    ("one_sided", APART): _FRAGMENTS,
    ("one_sided_dynamic", SHARED): _READ,
    ("one_sided_dynamic", UNATTACHED): _READ,
    ("one_sided_dynamic", LOOPBACK): _FETCHED,
    ("one_sided_dynamic", APART): _FETCHED,
}
NETWORK = "100Gb-infiniband"
# The constant TCP_LATENCY is the latency of a TCP message in seconds, as in the network preset
# "10GbE".
TCP_LATENCY = 20e-6
COPY = 10e9  # The constant COPY is the rounded rate in bytes/s at which a CPU core copies memory.
PLACE = "RDMA, predicted"


class Way(NamedTuple):
    """A transport, with the place where its two processes run.

    Attributes:
        transport: "grpc", or a name of `labkit.communicator.TRANSPORTS`.
        place: Where the two processes run and communicate, one of `PLACES`.
        copies: One description for each copy of the whole array that the transport makes.
    """

    transport: str
    place: str
    copies: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the transport and the place, such as `one_sided, shared memory`."""
        return f"{self.transport}, {self.place}"


WAYS = {way.name: way for way in (Way(*key, copies) for key, copies in _COPIES.items())}


def chosen(transports: Sequence[str], places: Sequence[str]) -> list[Way]:
    """Return all combinations of the named transports and places; no name selects all names.

    Raises:
        InvalidInput: A name is unknown.
    """
    known = list(dict.fromkeys(way.transport for way in WAYS.values()))
    for field, names, allowed in (("transport", transports, known), ("place", places, PLACES)):
        refuse_unknown(field, names, allowed)
    return [
        way
        for way in WAYS.values()
        if way.transport in (transports or known) and way.place in (places or PLACES)
    ]


class Protocol(NamedTuple):
    """The messages and memory copies by which a protocol transfers an array.

    Attributes:
        messages: Number of sequential messages; the last message contains the values of the array.
        copies: Number of times that a CPU copies all values of the array.
        description: Description of the protocol's messages.
        tcp: Whether the kernel's TCP stack transfers the messages.
    """

    messages: int
    copies: int
    description: str
    tcp: bool = False


PROTOCOLS = {
    "grpc": Protocol(1, 3, "the values, over the kernel's TCP", tcp=True),
    "two_sided": Protocol(
        3,
        2,
        "request to send, clear to send, and the values, which are copied into and out of a "
        "ring buffer",
    ),
    "one_sided": Protocol(1, 0, "the values, followed by a flag that marks their arrival"),
    "one_sided_dynamic": Protocol(3, 0, "metadata, request to read, the values"),
}


def predict(
    sizes: Sequence[int], network: str | Network = NETWORK, copy: float = COPY
) -> list[Row]:
    r"""Return one row per transport and array size, with the predicted time T:

    \[T = m \lambda + \frac{n}{\beta} + c \frac{n}{\gamma},\]

    where m is the number of sequential messages, and λ is the message latency. The link transfers n
    bytes at a bandwidth of β bytes/s. The transport makes c copies of the n bytes at γ bytes/s. The
    formula assumes that messages, the transfer and the copies do not overlap. The formula for the
    time neglects kernel load, small packets and memory registration.

    Args:
        sizes: Array sizes in bytes.
        network: The network, whose latency and bandwidth are used.
        copy: Rate at which a CPU core copies memory, in bytes/s.

    Source: J. Xue et al.: Fast distributed deep learning over RDMA, EuroSys 2019. Xue et al. report
    training speeds, not transfer times. Xue et al. train up to 25 times as fast as with
    TensorFlow's gRPC. Xue et al. also train faster than with an RPC library for RDMA.
    """
    link = Network.parse(network)
    # The function `Network.parse` returns None only if its argument is None.
    assert link is not None
    rows = []
    for transport, each in PROTOCOLS.items():
        latency = TCP_LATENCY if each.tcp else link.latency
        for nbytes in sizes:
            flow = float(finish_times([[0]], [nbytes], [0.0], [link.bandwidth])[0])
            seconds = each.messages * latency + flow + each.copies * nbytes / copy
            row = head("transport", f"{transport}, {PLACE}", "exchange", 2, link.name, bytes=nbytes)
            milliseconds = dict.fromkeys(("median_ms", "min_ms", "p90_ms"), 1e3 * seconds)
            rows.append(
                row
                | {"clock": "simulation", "transport": transport, "place": PLACE, "repeats": 1}
                | milliseconds
                | {"bandwidth": nbytes / seconds, "copies": each.copies, "copied": each.description}
            )
    return rows


# The constant HOSTS contains the names of two emulated hosts on this machine.
HOSTS = ("labkit-a", "labkit-b")
_PROCESS = "labkit.bench.transports.process"
# `OMPI_MCA_smsc` disables the components of Open MPI that read the memory of another process.
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
    """Start two MPI ranks in one of the places `labkit.bench.transports.starting.PLACES`.

    For TCP, each rank gets a different host name. With equal host names, Open MPI would access a
    window through shared memory. Open MPI would then ignore the network between the two ranks.

    Args:
        place: Where the two ranks run and communicate, such as "TCP on loopback".
        namespaces: Network namespaces of the two ranks. If None, the ranks communicate over
            loopback or in shared memory.

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
        # The command line sets Open MPI's parameters `btl` and `osc`. The values of `btl` and `osc`
        # depend on the place of measurement.
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
    """Return a command prefix for mpiexec: a network namespace with a network device."""
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
