"""Start of a cluster's ranks on this machine, on other hosts over ssh, or in a Slurm job."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import socket
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

from labkit.common.canonical_json import digest
from labkit.common.errors import InvalidInput, short
from labkit.common.machine import trusts_network
from labkit.common.nearest import refuse_unknown
from labkit.common.units import plural
from labkit.communicator import launcher
from labkit.hosts import host_list
from labkit.hosts.host_list import Host, hosts_of
from labkit.hosts.host_probe import OF_MPI, probe
from labkit.hosts.queue import Queue
from labkit.hosts.scripts import AGENT_VARIABLE

LAUNCHERS = ("local", "hosts", "slurm")
LAUNCH_COMMANDS = ("mpiexec", "srun")
MAPPINGS = ("slot", "node")
FURTHER = (
    "launch_command",
    "map_by",
    "options",
    "agent",
    "interface",
)  # `FURTHER` lists the options of the class Cluster that users rarely need.
# `labkit run --launcher …` sets the environment variables in `VARIABLES`. Notebooks without their
# own choice of launcher use the variables in `VARIABLES`.
VARIABLES = {
    "launcher": "LABKIT_LAUNCHER",
    "hosts": "LABKIT_HOSTS",
    "nodes": "LABKIT_NODES",
    "agent": "LABKIT_AGENT",
    "options": "LABKIT_SLURM",
}
# The environment variable LABKIT_FAULT_TOLERANT=1 has the same effect as the option
# --fault-tolerant of `labkit run`.
TOLERANT = "LABKIT_FAULT_TOLERANT"
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
# Each environment variable in `AGENTS` contains the command that Open MPI runs instead of ssh. Open
# MPI 5 reads the first variable in `AGENTS`, and earlier versions read the second variable.
AGENTS = (AGENT_VARIABLE, "OMPI_MCA_plm_rsh_agent")
# With the environment variables in `BY_AGENT`, Open MPI starts ranks over ssh, even inside a Slurm
# job.
BY_AGENT = {"PRTE_MCA_plm": "ssh", "OMPI_MCA_plm": "rsh"}
# The environment variable LABKIT_QUEUED contains the name of the Slurm job that labkit has
# submitted for the ranks.
JOB = "LABKIT_QUEUED"
LOOPBACK = "127.0.0.1"
SOME = 50  # labkit compares the routes to about 50 nodes (SOME) at most.
# `DISTRIBUTIONS` maps each value of the option `map_by` to Slurm's name for the same distribution
# of ranks.
DISTRIBUTIONS = {"slot": "block", "node": "cyclic"}


def _validate_counts(**counts: object) -> None:
    for field, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidInput(
                f"{field}={value!r} is impossible; give a whole number of at least 1"
            )


def _names() -> tuple[str, ...]:
    """Return the host names and addresses of this machine."""
    return LOOPBACK, "localhost", socket.gethostname()


class RankInfo(NamedTuple):
    """Facts about a rank's process; the rank reports them after the first barrier of the start."""

    rank: int
    size: int  # `size` is the number of ranks in MPI_COMM_WORLD, as this rank sees it.
    pid: int
    host: str


@dataclass(frozen=True)
class Start:
    """Launch options, which define how the ranks of a cluster start.

    Attributes:
        workers: Number of ranks, not counting spares.
        threads: Number of TensorFlow threads per rank.
        launcher: "local"; "hosts" (mpiexec through ssh or another agent); or "slurm".
        hosts: Hosts with the number of ranks of each, for the launcher "hosts".
        nodes: Number of Slurm nodes.
        launch_command: Command that starts ranks in a Slurm job: "mpiexec", or "srun" with PMIx.
        map_by: "slot" fills one host after another; "node" assigns ranks to hosts round-robin.
        options: Arguments of `salloc` or `srun`, such as "--partition=short --time=10".
        agent: Command that replaces ssh to start processes on other hosts.
        interface: Address at which the hosts reach this machine. If `interface` is "", labkit
            chooses the address from the routes to the hosts.
        fault_tolerant: Whether ranks survive the death of other ranks.
        spares: Number of additional ranks, each of which can replace a dead rank.
        trusted_network: Whether mpiexec may listen on every network interface if labkit cannot bind
            its sockets to loopback. If mpiexec listens on every interface, other machines can
            connect to mpiexec.
    """

    workers: int
    threads: int = 1
    launcher: str = "local"
    hosts: tuple[Host, ...] = ()
    nodes: int = 1
    launch_command: str = "mpiexec"
    map_by: str = "slot"
    options: str = ""
    agent: str = ""
    interface: str = ""
    fault_tolerant: bool = False
    spares: int = 0
    trusted_network: bool = False

    def __post_init__(self) -> None:
        for field, allowed in (
            ("launcher", LAUNCHERS),
            ("launch_command", LAUNCH_COMMANDS),
            ("map_by", MAPPINGS),
        ):
            refuse_unknown(field, [getattr(self, field)], allowed)
        _validate_counts(workers=self.workers, threads=self.threads, nodes=self.nodes)
        if self.launcher == "hosts" and not self.hosts:
            raise InvalidInput(
                "launcher='hosts' requires hosts, such as hosts=['a:2', 'b:2'] or the path "
                "of a host file"
            )
        if self.fault_tolerant and self.starter == "srun":
            raise InvalidInput(
                "fault_tolerant=True with launch_command='srun': Slurm ends all ranks of a job "
                "step when one rank dies; use launch_command='mpiexec'"
            )
        if self.spares and not self.fault_tolerant:
            raise InvalidInput(
                f"spares={self.spares} has no effect unless other ranks survive the death of a "
                "rank: also give fault_tolerant=True"
            )
        if self.spares < 0:
            raise InvalidInput(
                f"spares={self.spares} is impossible; give a whole number of at least 0"
            )
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.ranks > slots:
            raise InvalidInput(
                f"workers={self.workers}{self._beside} are too many for hosts with "
                f"{plural(slots, 'slot')}; give more slots: hosts=['a:4', …]"
            )
        if self.nodes > self.workers:
            raise InvalidInput(
                f"nodes={self.nodes} for workers={self.workers}: give at most as many nodes as "
                "workers, because each node needs a worker"
            )
        try:
            shlex.split(self.options)
            ipaddress.ip_address(self.interface or LOOPBACK)
        except ValueError as error:
            field = "interface" if self.interface else "options"
            given = short(getattr(self, field))
            raise InvalidInput(f"{field}={given} cannot be read: {error}") from None

    @classmethod
    def from_options(
        cls,
        workers: int | None = None,
        threads: int = 1,
        launcher: str | None = None,
        hosts: Sequence[str] | str | Path | None = None,
        nodes: int | None = None,
        fault_tolerant: bool = False,
        spares: int = 0,
        trusted_network: bool = False,
        **more: str,
    ) -> Self:
        """Return a Start from the given options; missing options come from the environment.

        Raises:
            InvalidInput: The value of an option is invalid.
        """
        _validate_counts(
            **{k: v for k, v in (("workers", workers), ("nodes", nodes)) if v is not None}
        )
        defaults = {field: os.environ.get(name, "") for field, name in VARIABLES.items()}
        fault_tolerant = fault_tolerant or os.environ.get(TOLERANT) == "1"
        if launcher is None:
            launcher = "hosts" if hosts else "slurm" if nodes else defaults["launcher"] or "local"
        listed: tuple[Host, ...] = ()
        if launcher == "hosts":
            listed = tuple(hosts_of(hosts or defaults["hosts"] or ()))
        elif hosts:
            raise InvalidInput(
                f"hosts= has no effect with launcher={launcher!r}; give launcher='hosts', or "
                "remove hosts="
            )
        if nodes is None:
            number = defaults["nodes"] or os.environ.get("SLURM_JOB_NUM_NODES", "1")
            nodes = int(number) if launcher == "slurm" else 1
            # A cluster with fewer workers than the Slurm job has nodes needs only one node per
            # worker.
            nodes = min(nodes, workers or nodes)
        if workers is None:
            slots = sum(host.slots for host in listed)
            workers = max(slots - spares, 1) if slots else max(nodes, 2)
        for field in ("agent", "options"):
            more[field] = more.get(field) or defaults[field]
        # Ranks on this machine need neither a replacement for ssh nor options for Slurm.
        if launcher == "local":
            more |= {"agent": "", "options": ""}
        return cls(
            workers,
            threads,
            launcher,
            listed,
            nodes,
            fault_tolerant=fault_tolerant,
            spares=spares,
            trusted_network=trusted_network or trusts_network(),
            **more,
        )

    def to_json(self) -> str:
        """Return the options as JSON text, for the command line of the cluster's keeper process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the `Start` object from a text that `to_json` has written."""
        record = json.loads(text)
        return cls(**record | {"hosts": tuple(Host(*host) for host in record["hosts"])})

    @property
    def ranks(self) -> int:
        """Number of all ranks, including workers and spares."""
        return self.workers + self.spares

    @property
    def ranks_here(self) -> int:
        """Number of ranks that start on this machine, as determined by the host names."""
        if self.is_local:
            return self.ranks
        here = sum(host.slots for host in self.hosts if host.name in _names())
        return min(self.ranks, here)

    def check_hosts(self) -> None:
        """Raise an error if the host list names only this machine.

        Raises:
            InvalidInput: All hosts are this machine, and `trusted_network` is False. The sockets of
                mpiexec would be exposed to the network without need.
        """
        if not self.hosts or self.trusted_network:
            return
        if {host.name for host in self.hosts} <= {*_names()}:
            raise InvalidInput(
                "hosts= names only this machine, and mpiexec over hosts listens on every network "
                "interface without a key: remove hosts=, or give trusted_network=True if you "
                "trust the network"
            )

    @property
    def _beside(self) -> str:
        return f" and spares={self.spares}" if self.spares else ""

    @property
    def is_local(self) -> bool:
        """Whether all ranks are processes of this machine."""
        return self.launcher == "local"

    @property
    def name(self) -> str:
        """Name of the cluster, from its numbers of ranks and threads and its launch options."""
        shape = f"{self.workers}x{self.threads}{'-ft' if self.fault_tolerant else ''}"
        shape += f"-{self.spares}spare" if self.spares else ""
        shape += "-trusted" if self.trusted_network else ""
        if self.is_local:
            return shape
        checksum = digest([self.to_json(), os.environ.get("SLURM_JOB_ID", ""), *self.login])[:6]
        return f"{shape}-{self.launcher}-{checksum}"

    @property
    def in_allocation(self) -> bool:
        """Whether the ranks use the nodes of the Slurm job in which this process runs."""
        return self.launcher == "slurm" and "SLURM_JOB_ID" in os.environ

    @property
    def queues(self) -> bool:
        """Whether the ranks need their own Slurm job, which may wait in Slurm's queue."""
        return self.launcher == "slurm" and not self.in_allocation

    @property
    def starter(self) -> str:
        """The command that starts the ranks: "mpiexec" or "srun"."""
        return "srun" if self.launcher == "slurm" and self.launch_command == "srun" else "mpiexec"

    @cached_property
    def login(self) -> list[str]:
        """Prefix of commands for the login node; cached, because a testbed may end early."""
        return host_list.login()

    def environment(self, job: str) -> dict[str, str]:
        """Return the environment variables for the ranks and for the command that starts them.

        Args:
            job: Name of the Slurm job.
        """
        variables = launcher.environment(self.threads, over_hosts=not self.is_local)
        if self.queues:
            variables[JOB] = job
        variables |= {name: os.environ[name] for name in OF_MPI if name in os.environ}
        if self.launcher == "hosts":
            agent = self.agent or shlex.join(host_list.agent())
            variables |= dict.fromkeys(AGENTS, SSH if agent == "ssh" else agent) | BY_AGENT
        return variables

    def command(self, job: str, variables: Sequence[str]) -> list[str]:
        """Return the command line that starts ranks, without `-n` and the number of ranks.

        Args:
            job: Name of the Slurm job.
            variables: Names of environment variables that mpiexec must pass to the ranks. The
                commands salloc and srun pass all variables anyway.
        """
        if self.is_local:
            return launcher.mpiexec(outlives=self.fault_tolerant)
        mapping = ["--map-by", self.map_by]
        # The ranks start in the folder "/", which exists on every host. Each later call changes to
        # the caller's folder.
        start = launcher.mpiexec(outlives=self.fault_tolerant, over_hosts=True)
        mpiexec = [*start, *mapping, "--wdir", "/"]
        mpiexec += [word for name in variables for word in ("-x", name)]
        if self.launcher == "hosts":
            hosts = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            return [*self.login, *mpiexec, "--host", hosts]
        if self.in_allocation:
            return mpiexec if self.launch_command == "mpiexec" else [*self._srun(), "--overlap"]
        tasks_per_node = -(-self.ranks // self.nodes)
        size = [
            f"--nodes={self.nodes}",
            f"--ntasks={self.ranks}",
            f"--ntasks-per-node={tasks_per_node}",
        ]
        # The size and name of the job come last, because Slurm lets later options override earlier
        # ones.
        options = [*shlex.split(self.options), *size, f"--cpus-per-task={self.threads}"]
        options.append(f"--job-name={job}")
        if self.launch_command == "srun":
            return [*self.login, *self._srun(), *options]
        return [*self.login, "salloc", *options, *mpiexec]

    def _srun(self) -> list[str]:
        mapping = f"--distribution={DISTRIBUTIONS[self.map_by]}"
        return ["srun", "--mpi=pmix", "--chdir=/", "--kill-on-bad-exit=1", mapping]

    def address(self) -> str:
        """Return the address of this machine on which the cluster's controller listens.

        Raises:
            LabkitError: Hosts reach this machine by different addresses; the message tells how to
                choose one.
        """
        if self.is_local:
            return LOOPBACK
        if self.interface:
            return self.interface
        if self.launcher == "hosts":
            return host_list.local_address(host_list.addresses([host.name for host in self.hosts]))
        if self.in_allocation:
            nodes = self.queue().nodes(named=os.environ["SLURM_JOB_NODELIST"])
        else:
            nodes = self.queue().nodes(self.partition)
        return host_list.local_address(node.address for node in nodes[:: 1 + len(nodes) // SOME])

    @property
    def partition(self) -> str | None:
        """Partition of the Slurm job; None: the default partition of Slurm."""
        parser = ArgumentParser(add_help=False)
        parser.add_argument("-p", "--partition", default=os.environ.get("SALLOC_PARTITION"))
        name: str | None = parser.parse_known_args(shlex.split(self.options))[0].partition
        return name

    def queue(self) -> Queue:
        """Return an object that queries Slurm's queue by commands on the login node."""
        return Queue(self.login)

    def trouble(self) -> str:
        """Return the problems of the hosts as text, or "" if no problem is found."""
        if self.launcher != "hosts":
            return ""
        agent = shlex.split(self.agent) or host_list.agent()
        results = probe([host.name for host in self.hosts], agent)
        return "; ".join(result.trouble for result in results if result.trouble)

    def check_world(self, infos: Sequence[RankInfo]) -> None:
        """Raise InvalidInput unless the ranks share one MPI_COMM_WORLD on the requested hosts."""
        sizes = Counter(info.size for info in infos)
        if set(sizes) != {self.ranks}:
            worlds = ", ".join(f"{plural(n, 'world')} of {size}" for size, n in sizes.items())
            raise InvalidInput(
                f"{self.ranks} ranks must share one MPI_COMM_WORLD, but form {worlds}: "
                f"{self._why_apart()}"
            )
        hosts = list(dict.fromkeys(info.host for info in infos))
        # A Slurm job may have more nodes than the ranks need, so `check_world` accepts any number
        # of nodes.
        if self.is_local or self.in_allocation or len(hosts) == self._hosts_wanted():
            return
        raise InvalidInput(
            f"the ranks are on {plural(len(hosts), 'host')} ({', '.join(hosts)}), but the number "
            f"of requested hosts is {self._hosts_wanted()}"
        )

    def _why_apart(self) -> str:
        if self.starter == "srun":
            return (
                "srun started the ranks without PMIx (--mpi=none, or Slurm has no plugin for "
                "PMIx); `srun --mpi=list` shows Slurm's plugins; launch_command='mpiexec' needs "
                "no plugin"
            )
        return (
            "mpiexec and the MPI library of mpi4py do not match; `labkit doctor` shows both, and "
            "says how to make them match"
        )

    def _hosts_wanted(self) -> int:
        if self.launcher == "slurm":
            return self.nodes
        if self.map_by == "node":
            return min(len(self.hosts), self.ranks)
        filled = accumulate(host.slots for host in self.hosts)
        return 1 + sum(slots < self.ranks for slots in filled)
