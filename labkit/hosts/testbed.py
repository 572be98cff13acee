"""A testbed: several hosts on this machine, to try on them what is meant for a cluster."""

from __future__ import annotations

import os
import secrets
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.common.html import card, pairs
from labkit.common.units import plural
from labkit.hosts import state, switch
from labkit.hosts.host_namespaces import entering
from labkit.hosts.plan import LOGIN, Plan
from labkit.hosts.requirements import found
from labkit.hosts.scripts import TESTBED

# Variables of this process that say where something of this host is, and not of another.
OF_A_HOST = ("TMPDIR", "LABKIT_RUNTIME")
# Who dies takes the command along: nothing waits for its answer any more.
DIES_ALONG = ("--pdeathsig", "KILL")


class Testbed:
    """Hosts that are up, with their links, until it is closed; made by `testbed`.

    Each host has a host name, `/etc/hosts`, `/tmp`, `/dev/shm`, XDG_RUNTIME_DIR, processes and
    network of its own. All see the rest of this machine's files, as hosts of a cluster see a file
    system that they share; in /tmp those of Python, of labkit and of the folder where it was made.
    This machine is the login node: it has a route to the hosts, and runs `srun` and `mpiexec`.

    Attributes:
        hosts: their names, "a", "b", …
        plan: how many, how fast; what was asked for.
        addresses: of each host, of "control", where slurmctld runs, and of "login", this machine.
        agent: a command that takes ssh's words and runs a command on a host.
        network: the hosts' addresses as CIDR, for `OMPI_MCA_btl_tcp_if_include` and its like.
    """

    __test__ = False  # pytest takes it for one of its own by its name

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Start the hosts, and wait for them; `testbed` chooses the folder."""
        self.plan, self.hosts = plan, plan.hosts
        said, holder = state.start(folder, plan, parent=True)
        self.addresses, self.agent = said["addresses"], folder / state.AGENT
        self.network = f"{self.addresses[LOGIN].rpartition('.')[0]}.0/24"
        self._said, self._folder = said, folder
        # Also where nobody closes it, and the object is forgotten.
        self._end = weakref.finalize(self, _end, holder, os.getpid())
        # Clusters of this process start through its login node; then through that of an outer one.
        self._outer = os.environ.get(TESTBED)
        os.environ[TESTBED] = str(folder)

    def close(self) -> None:
        """End every process of all hosts, and remove links, mounts, namespaces and files."""
        self._end()
        if os.environ.get(TESTBED) == str(self._folder):
            del os.environ[TESTBED]
            if self._outer is not None:
                os.environ[TESTBED] = self._outer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, host: str, words: Sequence[str | Path]) -> list[str]:
        """The words of this machine that carry a command out on a host, or on the login node.

        It inherits the environment and begins in the folder where the testbed was made. It ends
        when the process that started it does.

        Args:
            host: its name, or "login".
            words: the command and its arguments.

        Raises:
            InvalidInput: there is no such host.
            LabkitError: the testbed has ended.
        """
        kept = [found("setpriv") or "setpriv", *DIES_ALONG]
        if host == LOGIN:
            self._check_up()
            return [*kept, str(self._folder / state.LOGIN_COMMAND), *map(str, words)]
        pid = self._pid(host)
        own = [f"XDG_RUNTIME_DIR={self._said['runtime']}", f"HOSTNAME={host}"]
        if self.plan.slurm:
            own.append(f"SLURM_CONF={self._folder / state.SLURM_CONF}")
        there = ["env", f"--chdir={self._said['home']}", *(f"--unset={n}" for n in OF_A_HOST)]
        return [*entering(pid), *kept, *there, *own, *map(str, words)]

    def run(
        self, host: str, words: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Carry a command out on a host, and wait for it; `stdout` and `stderr` are what it said.

        Args:
            host: its name, or "login".
            words: the command and its arguments.
            options: of `subprocess.run`, such as `timeout=60` or `check=True`.
        """
        given = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | options
        if "input" in given:
            del given["stdin"]
        done: subprocess.CompletedProcess[str] = subprocess.run(self.command(host, words), **given)
        return done

    def login(
        self, words: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Carry a command out on the login node, this machine: `srun`, `sbatch`, `mpiexec`."""
        return self.run(LOGIN, words, **options)

    def sent(self, host: str) -> int:
        """Bytes that a host has sent over its link, with the headers of its packets."""
        return switch.sent(self._pid(host))

    def link_down(self, host: str | None = None) -> None:
        """Pull the cable of a host, or of all: nothing gets through until `link_up`."""
        self._set_links(host, up=False)

    def link_up(self, host: str | None = None) -> None:
        """Put the cable of a host back, or those of all."""
        self._set_links(host, up=True)

    def _set_links(self, host: str | None, up: bool) -> None:
        for name in self.hosts if host is None else (host,):
            self._pid(name)
            switch.set_link(self._said["control"], name, up)

    def _pid(self, host: str) -> int:
        self._check_up()
        if host not in self.hosts:
            raise InvalidInput(
                f"host={short(host)} is not in this testbed; it has: {', '.join(self.hosts)}"
            )
        return self._said["hosts"][host]

    def _check_up(self) -> None:
        # Not a moment later: the numbers of its processes may be those of others by then.
        if state.state(self._folder) is None:
            raise LabkitError("the testbed has ended; make another one: lk.testbed(…)")

    def __repr__(self) -> str:
        up = "up" if self._end.alive else "closed"
        return f"<testbed of {plural(len(self.hosts), 'host')} at {self.plan.bandwidth}, {up}>"

    def _repr_html_(self) -> str:
        return card(
            f"Testbed, {'up' if self._end.alive else 'closed'}",
            pairs(
                {
                    "hosts": ", ".join(f"{name} {self.addresses[name]}" for name in self.hosts),
                    "link of each": f"{self.plan.bandwidth}, each direction",
                    "Slurm": f"{plural(self.plan.cores, 'CPU')} a node"
                    if self.plan.slurm
                    else "none",
                }
            ),
        )


def testbed(
    nodes: int = 2, cores: int = 2, bandwidth: str = "1Gb/s", slurm: bool = True
) -> Testbed:
    """Hosts on this machine, joined by links of a given rate, with Slurm on them.

    They end with the `with` block, or with this process, however it ends, and nothing is left.

    Args:
        nodes: hosts, 2 to 8, named a, b, c, …
        cores: CPUs that Slurm counts on each of them; the machine need not have as many.
        bandwidth: of each host's link, each direction, such as "1Gb/s".
        slurm: whether Slurm runs on them.

    Raises:
        InvalidInput: a value that cannot work.
        LabkitError: root, Linux's namespaces, iproute2 or Slurm are missing.
    """
    plan = Plan(nodes, cores, bandwidth, slurm)
    return Testbed(state.folder_of(f"{os.getpid()}-{secrets.token_hex(3)}"), plan)


def _end(holder: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() != owner:  # a copy of that process, made by a fork, which ends before it
        return
    holder.terminate()
    holder.wait()
    if holder.stdout is not None:
        holder.stdout.close()
