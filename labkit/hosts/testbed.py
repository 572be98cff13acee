"""A testbed: several virtual hosts on this machine, to test cluster configurations."""

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
from labkit.hosts import switch, testbed_state
from labkit.hosts.host_namespaces import enter_command
from labkit.hosts.scripts import TESTBED
from labkit.hosts.testbed_state import LOGIN, TestbedPlan, find_command

# The environment variables in `OF_A_HOST` contain paths of the real machine. Virtual hosts do not
# inherit the variables in `OF_A_HOST`.
OF_A_HOST = ("TMPDIR", "LABKIT_RUNTIME")
# With the option `--pdeathsig` of setpriv, the kernel kills a command when the command's parent
# process dies.
DIES_ALONG = ("--pdeathsig", "KILL")


class Testbed:
    """Running virtual hosts and their links, which `testbed` creates and `close` ends.

    Each host has its own host name, `/etc/hosts`, `/tmp`, `/dev/shm`, XDG_RUNTIME_DIR, processes
    and network. All hosts share all other files of this machine, like the shared file system of a
    cluster. If Python's folders, labkit's folder or the working folder are inside `/tmp`, all hosts
    also share these folders. This machine is the login node of the hosts, and has a route to them.
    The commands `srun` and `mpiexec` run on this machine.

    Attributes:
        hosts: Names of the hosts, "a", "b", …
        plan: Parameters of the testbed.
        addresses: IPv4 addresses, as a mapping from host name to address. The name "control" is the
            host of slurmctld, and "login" is this machine.
        agent: Path of a command that replaces ssh.
        network: IP network of the hosts in CIDR notation, for Open MPI's variable
            `OMPI_MCA_btl_tcp_if_include`.
    """

    # Without `__test__ = False`, pytest takes the class `Testbed` for a test because of its name.
    __test__ = False

    def __init__(self, folder: Path, plan: TestbedPlan) -> None:
        """Start the hosts of `plan` in the new folder `folder`, and wait until they are ready."""
        self.plan, self.hosts = plan, plan.hosts
        record, supervisor = testbed_state.start(folder, plan, parent=True)
        self.addresses, self.agent = record["addresses"], folder / testbed_state.AGENT
        self.network = f"{self.addresses[LOGIN].rpartition('.')[0]}.0/24"
        self._state, self._folder = record, folder
        # The finalizer also ends the testbed if the `Testbed` object is garbage-collected without a
        # call of `close`.
        self._end = weakref.finalize(self, _end, supervisor, os.getpid())
        # After the start of a testbed, new clusters of this process use the testbed's login node.
        # With nested testbeds, `close` restores the login node of the outer testbed.
        self._outer = os.environ.get(TESTBED)
        os.environ[TESTBED] = str(folder)

    def close(self) -> None:
        """End every process of all hosts, and remove their links, mounts, namespaces and files."""
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
        """Return the command line that runs a command on a host or on the login node.

        The command inherits this process's environment, and starts in the folder in which the
        testbed was created. The command ends when its parent process ends.

        Args:
            host: Name of the host, or "login" for the login node.
            words: The command and its arguments.

        Raises:
            InvalidInput: The testbed has no host with this name.
            LabkitError: The testbed has ended.
        """
        prefix = [find_command("setpriv") or "setpriv", *DIES_ALONG]
        if host == LOGIN:
            self._check_up()
            return [*prefix, str(self._folder / testbed_state.LOGIN_COMMAND), *map(str, words)]
        pid = self._pid(host)
        variables = [f"XDG_RUNTIME_DIR={self._state['runtime']}", f"HOSTNAME={host}"]
        if self.plan.slurm:
            variables.append(f"SLURM_CONF={self._folder / testbed_state.SLURM_CONF}")
        environment = [
            "env",
            f"--chdir={self._state['home']}",
            *(f"--unset={n}" for n in OF_A_HOST),
        ]
        return [*enter_command(pid), *prefix, *environment, *variables, *map(str, words)]

    def run(
        self, host: str, words: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, wait until it ends, and return its exit code and output.

        Args:
            host: Name of the host, or "login" for the login node.
            words: The command and its arguments.
            options: Arguments of `subprocess.run`, such as `timeout=60` or `check=True`.
        """
        arguments = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL} | options
        if "input" in arguments:
            del arguments["stdin"]
        result: subprocess.CompletedProcess[str] = subprocess.run(
            self.command(host, words), **arguments
        )
        return result

    def login(
        self, words: Sequence[str | Path], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command such as `srun`, `sbatch` or `mpiexec` on the login node (this machine)."""
        return self.run(LOGIN, words, **options)

    def sent(self, host: str) -> int:
        """Return the total bytes that a host has sent over its link, including packet headers."""
        return switch.bytes_sent(self._pid(host))

    def link_down(self, host: str | None = None) -> None:
        """Take down the link of one host or of all hosts; no packet passes until `link_up`."""
        self._set_links(host, up=False)

    def link_up(self, host: str | None = None) -> None:
        """Bring up the link of one host or of all hosts again."""
        self._set_links(host, up=True)

    def _set_links(self, host: str | None, up: bool) -> None:
        for name in self.hosts if host is None else (host,):
            self._pid(name)
            switch.set_link(self._state["control"], name, up)

    def _pid(self, host: str) -> int:
        self._check_up()
        if host not in self.hosts:
            raise InvalidInput(
                f"host={short(host)} is not in this testbed; allowed: {', '.join(self.hosts)}"
            )
        return self._state["hosts"][host]

    def _check_up(self) -> None:
        # The system may reuse process ids after the end of the testbed. `_check_up` is therefore
        # called before each use of a process id.
        if testbed_state.read_state(self._folder) is None:
            raise LabkitError("the testbed has ended; start another one with lk.testbed(…)")

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
    """Start virtual hosts on this machine, joined by links of a given rate, with Slurm.

    The hosts end with the `with` block, or when this process ends, even by a crash. After their
    end, the hosts leave no files, devices or processes.

    Args:
        nodes: Number of hosts, 2 to 8, named a, b, c, …; default: 2.
        cores: Number of CPUs that each host has in Slurm, possibly more than the machine has cores;
            default: 2.
        bandwidth: Rate of each host's link in each direction, such as "100Mb/s"; default: "1Gb/s".
        slurm: Whether the hosts run Slurm; default: True.

    Raises:
        InvalidInput: A value is invalid.
        LabkitError: The user is not root, or Linux namespaces, iproute2 or Slurm are missing.
    """
    plan = TestbedPlan(nodes, cores, bandwidth, slurm)
    return Testbed(testbed_state.folder_of(f"{os.getpid()}-{secrets.token_hex(3)}"), plan)


def _end(supervisor: subprocess.Popen[str], owner: int) -> None:
    # A forked copy of a process must not end the testbed of the original process.
    if os.getpid() != owner:
        return
    supervisor.terminate()
    supervisor.wait()
    if supervisor.stdout is not None:
        supervisor.stdout.close()
