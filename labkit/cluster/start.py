"""How the ranks of a cluster start, and where: on this machine, on hosts, or by Slurm."""

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
from labkit.hosts import connection
from labkit.hosts.host_list import Host, hosts_of
from labkit.hosts.probe import OF_MPI, probe
from labkit.hosts.queue import Queue
from labkit.hosts.scripts import AGENT_VARIABLE

LAUNCHERS = ("local", "hosts", "slurm")
STEPS = ("mpiexec", "srun")
PLACES = ("core", "node")
FURTHER = ("step", "place", "options", "agent", "interface")  # of a cluster, beside what is usual
# What a notebook that names no launcher takes: set by `labkit run --launcher …`, and in jobs.
VARIABLES = {
    "launcher": "LABKIT_LAUNCHER",
    "hosts": "LABKIT_HOSTS",
    "nodes": "LABKIT_NODES",
    "agent": "LABKIT_AGENT",
    "options": "LABKIT_SLURM",
}
TOLERANT = "LABKIT_FAULT_TOLERANT"  # "1": clusters are, as by `labkit run --fault-tolerant`
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
# By the words of Open MPI 5, and of those before.
AGENTS = (AGENT_VARIABLE, "OMPI_MCA_plm_rsh_agent")
BY_AGENT = {"PRTE_MCA_plm": "ssh", "OMPI_MCA_plm": "rsh"}  # also inside a job of Slurm's
JOB = "LABKIT_QUEUED"  # names the job that a keeper has queued to its ranks, who end it when alone
LOOPBACK = "127.0.0.1"
SOME = 50  # nodes that are asked by which address they reach this machine
DISTRIBUTIONS = {"core": "block", "node": "cyclic"}  # Slurm's words for places


def _check_counts(**counts: object) -> None:
    for field, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{field}={value!r} is impossible; give a whole number from 1")


def _names() -> tuple[str, ...]:
    """Return the names that this machine has for itself."""
    return LOOPBACK, "localhost", socket.gethostname()


class Met(NamedTuple):
    """What a rank says of itself once all have come."""

    rank: int
    size: int  # of its MPI world
    pid: int
    host: str


@dataclass(frozen=True)
class Start:
    """All that settles how ranks start.

    Attributes:
        workers: ranks.
        threads: TensorFlow's threads in each.
        launcher: "local"; "hosts" (mpiexec through ssh or another agent); or "slurm".
        hosts: by name, with the ranks that each takes; of "hosts".
        nodes: how many nodes Slurm gives.
        step: what starts ranks in an allocation of Slurm: "mpiexec", or "srun" by PMIx.
        place: "core" fills one host after the other, "node" deals ranks out to hosts in turn.
        options: further words for `salloc` or `srun`, such as "--partition=short --time=10".
        agent: the command in place of ssh.
        interface: the address of this machine that hosts reach; "" finds it by the routes.
        fault_tolerant: ranks outlive the death of others.
        spares: further ranks, which wait to take the place of one that dies.
        trusted_network: mpiexec of this machine may listen on every interface, where the system
            does not let labkit bind it to loopback: whoever reaches the machine then reaches it.
    """

    workers: int
    threads: int = 1
    launcher: str = "local"
    hosts: tuple[Host, ...] = ()
    nodes: int = 1
    step: str = "mpiexec"
    place: str = "core"
    options: str = ""
    agent: str = ""
    interface: str = ""
    fault_tolerant: bool = False
    spares: int = 0
    trusted_network: bool = False

    def __post_init__(self) -> None:
        for field, allowed in (("launcher", LAUNCHERS), ("step", STEPS), ("place", PLACES)):
            refuse_unknown(field, [getattr(self, field)], allowed)
        _check_counts(workers=self.workers, threads=self.threads, nodes=self.nodes)
        if self.launcher == "hosts" and not self.hosts:
            raise InvalidInput("launcher='hosts' wants hosts=['a:2', 'b:2'], or a host file")
        if self.fault_tolerant and self.starter == "srun":
            raise InvalidInput(
                "fault_tolerant=True with step='srun': Slurm ends a step with its first dead rank; "
                "use step='mpiexec'"
            )
        if self.spares and not self.fault_tolerant:
            raise InvalidInput(
                f"spares={self.spares} take the places of the dead, whom others must outlive: "
                "give fault_tolerant=True, too"
            )
        if self.spares < 0:
            raise InvalidInput(f"spares={self.spares} is impossible; give a whole number from 0")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.ranks > slots:
            raise InvalidInput(
                f"workers={self.workers}{self._beside} on hosts with {plural(slots, 'slot')}; "
                "give them more: hosts=['a:4', …]"
            )
        if self.nodes > self.workers:
            raise InvalidInput(f"nodes={self.nodes} for workers={self.workers}: a node needs one")
        try:
            shlex.split(self.options)
            ipaddress.ip_address(self.interface or LOOPBACK)
        except ValueError as error:
            field = "interface" if self.interface else "options"
            given = short(getattr(self, field))
            raise InvalidInput(f"{field}={given} cannot be read: {error}") from None

    @classmethod
    def asked(
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
        """What a caller asks for; the rest by the environment, see `VARIABLES`.

        Raises:
            InvalidInput: a value that cannot work.
        """
        _check_counts(
            **{k: v for k, v in (("workers", workers), ("nodes", nodes)) if v is not None}
        )
        found = {field: os.environ.get(name, "") for field, name in VARIABLES.items()}
        fault_tolerant = fault_tolerant or os.environ.get(TOLERANT) == "1"
        if launcher is None:
            launcher = "hosts" if hosts else "slurm" if nodes else found["launcher"] or "local"
        listed: tuple[Host, ...] = ()
        if launcher == "hosts":
            listed = tuple(hosts_of(hosts or found["hosts"] or ()))
        elif hosts:
            raise InvalidInput(f"hosts= belong to launcher='hosts', not to {launcher!r}")
        if nodes is None:
            given = found["nodes"] or os.environ.get("SLURM_JOB_NUM_NODES", "1")
            nodes = int(given) if launcher == "slurm" else 1
            nodes = min(nodes, workers or nodes)  # a notebook's own small clusters need fewer
        if workers is None:
            slots = sum(host.slots for host in listed)
            workers = max(slots - spares, 1) if slots else max(nodes, 2)
        for field in ("agent", "options"):
            more[field] = more.get(field) or found[field]
        if launcher == "local":  # what others would start by says nothing of it
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
        """For the keeper's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        record = json.loads(text)
        return cls(**record | {"hosts": tuple(Host(*host) for host in record["hosts"])})

    @property
    def ranks(self) -> int:
        """All that start: workers and spares."""
        return self.workers + self.spares

    @property
    def ranks_here(self) -> int:
        """Ranks that start on this machine, as far as hosts' names tell."""
        if self.is_local:
            return self.ranks
        here = sum(host.slots for host in self.hosts if host.name in _names())
        return min(self.ranks, here)

    def check_hosts(self) -> None:
        """Refuse hosts that all are this machine, where mpiexec would listen for no other one.

        Raises:
            InvalidInput: they are, and nobody trusts the network.
        """
        if not self.hosts or self.trusted_network:
            return
        if {host.name for host in self.hosts} <= {*_names()}:
            raise InvalidInput(
                "hosts= name this machine alone, and mpiexec over hosts listens on every interface "
                "without a key: leave hosts= out, or give trusted_network=True where you trust the "
                "network"
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
        """By which clusters of one shape share their engines."""
        shape = f"{self.workers}x{self.threads}{'-ft' if self.fault_tolerant else ''}"
        shape += f"-{self.spares}spare" if self.spares else ""
        shape += "-trusted" if self.trusted_network else ""
        if self.is_local:
            return shape
        told = digest([self.to_json(), os.environ.get("SLURM_JOB_ID", ""), *self.login])[:6]
        return f"{shape}-{self.launcher}-{told}"

    @property
    def in_allocation(self) -> bool:
        """Whether this process is in a job of Slurm already, whose nodes the ranks take."""
        return self.launcher == "slurm" and "SLURM_JOB_ID" in os.environ

    @property
    def queues(self) -> bool:
        """Whether a job of its own has to wait for nodes."""
        return self.launcher == "slurm" and not self.in_allocation

    @property
    def starter(self) -> str:
        """The command that starts the ranks."""
        return "srun" if self.launcher == "slurm" and self.step == "srun" else "mpiexec"

    @cached_property
    def login(self) -> list[str]:
        """Words before commands for the login node; the same to the end, whatever ends before."""
        return connection.login()

    def environment(self, job: str) -> dict[str, str]:
        """Variables of the ranks, and of what starts them.

        Args:
            job: the name of the job that is queued for them.
        """
        found = launcher.environment(self.threads, over_hosts=not self.is_local)
        if self.queues:
            found[JOB] = job
        found |= {name: os.environ[name] for name in OF_MPI if name in os.environ}
        if self.launcher == "hosts":
            agent = self.agent or shlex.join(connection.agent())
            found |= dict.fromkeys(AGENTS, SSH if agent == "ssh" else agent) | BY_AGENT
        return found

    def command(self, job: str, variables: Sequence[str]) -> list[str]:
        """The words that start ranks, before `-n` and their number.

        Args:
            job: the name of the job to queue for them.
            variables: names of those that ranks need; Slurm's own commands hand on all.
        """
        if self.is_local:
            return launcher.mpiexec(outlives=self.fault_tolerant)
        spread = ["--map-by", "slot" if self.place == "core" else "node"]
        # In a folder that is everywhere: the work's need not be, and each call changes to it.
        started = [*launcher.mpiexec(outlives=self.fault_tolerant), *spread, "--wdir", "/"]
        started += [word for name in variables for word in ("-x", name)]
        if self.launcher == "hosts":
            named = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            return [*self.login, *started, "--host", named]
        if self.in_allocation:
            return started if self.step == "mpiexec" else [*self._srun(), "--overlap"]
        each = -(-self.ranks // self.nodes)
        sized = [f"--nodes={self.nodes}", f"--ntasks={self.ranks}", f"--ntasks-per-node={each}"]
        # Last, where they win: by its name the job is found.
        asked = [*shlex.split(self.options), *sized, f"--cpus-per-task={self.threads}"]
        asked.append(f"--job-name={job}")
        if self.step == "srun":
            return [*self.login, *self._srun(), *asked]
        return [*self.login, "salloc", *asked, *started]

    def _srun(self) -> list[str]:
        spread = f"--distribution={DISTRIBUTIONS[self.place]}"
        return ["srun", "--mpi=pmix", "--chdir=/", "--kill-on-bad-exit=1", spread]

    def address(self) -> str:
        """The address of this machine on which the controller listens, and on no other.

        Raises:
            LabkitError: hosts reach it by several; the message says how to choose.
        """
        if self.is_local:
            return LOOPBACK
        if self.interface:
            return self.interface
        if self.launcher == "hosts":
            return connection.own_address(connection.addresses([host.name for host in self.hosts]))
        if self.in_allocation:
            nodes = self.queue().nodes(named=os.environ["SLURM_JOB_NODELIST"])
        else:
            nodes = self.queue().nodes(self.partition)
        return connection.own_address(node.address for node in nodes[:: 1 + len(nodes) // SOME])

    @property
    def partition(self) -> str | None:
        """Whose nodes a job asks for; None: Slurm's default."""
        parser = ArgumentParser(add_help=False)
        parser.add_argument("-p", "--partition", default=os.environ.get("SALLOC_PARTITION"))
        found: str | None = parser.parse_known_args(shlex.split(self.options))[0].partition
        return found

    def queue(self) -> Queue:
        """Slurm's, by the commands of the login node."""
        return Queue(self.login)

    def trouble(self) -> str:
        """What is wrong with each of the hosts; "" where nothing is known to be."""
        if self.launcher != "hosts":
            return ""
        agent = shlex.split(self.agent) or connection.agent()
        answers = probe([host.name for host in self.hosts], agent)
        return "; ".join(answer.trouble for answer in answers if answer.trouble)

    def check_world(self, met: Sequence[Met]) -> None:
        """Raise InvalidInput unless ranks are one MPI world on the hosts that were asked for."""
        sizes = Counter(each.size for each in met)
        if set(sizes) != {self.ranks}:
            told = ", ".join(f"{plural(n, 'world')} of {size}" for size, n in sizes.items())
            raise InvalidInput(f"{self.ranks} ranks make {told}, not one: {self._why_apart()}")
        hosts = list(dict.fromkeys(each.host for each in met))
        # In an allocation, which may have more nodes than these ranks fill, any of them will do.
        if self.is_local or self.in_allocation or len(hosts) == self._hosts_wanted():
            return
        raise InvalidInput(
            f"the ranks are on {plural(len(hosts), 'host')} ({', '.join(hosts)}), "
            f"and {self._hosts_wanted()} were asked for"
        )

    def _why_apart(self) -> str:
        if self.starter == "srun":
            return (
                "the step ran without PMIx (--mpi=none, or Slurm has no plugin for it); "
                "`srun --mpi=list` shows what this site has, and step='mpiexec' needs none"
            )
        return (
            "mpiexec and the MPI library of mpi4py do not belong together; "
            "`labkit doctor` names both, and says how to choose"
        )

    def _hosts_wanted(self) -> int:
        if self.launcher == "slurm":
            return self.nodes
        if self.place == "node":
            return min(len(self.hosts), self.ranks)
        filled = accumulate(host.slots for host in self.hosts)
        return 1 + sum(slots < self.ranks for slots in filled)
