"""The Linux namespaces of a virtual host: network, mounts, host name, processes and IPC.

The namespaces of a virtual host have no name under /run/netns. The kernel removes unnamed
namespaces when their last process ends, even by a crash.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil

from labkit.common.errors import LabkitError
from labkit.hosts.host_init import READY, Specification
from labkit.hosts.requirements import find_command

KINDS = ("--mount", "--uts", "--ipc", "--net", "--pid")


def enter_command(pid: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """Return the prefix that runs a command in the namespaces of the process `pid`."""
    return [find_command("nsenter") or "nsenter", "--target", str(pid), *kinds]


class HostNamespaces:
    """The Linux namespaces of one virtual host, from the host's start to its end.

    Args:
        host: Properties of the virtual host.
        within: Id of a process whose PID namespace contains the host, so that the host ends with
            this namespace; None: the namespace of this process.
    """

    def __init__(self, host: Specification, within: int | None = None) -> None:
        self.name = host["name"]
        # id of the host's first process in the PID namespace of this process; `wait` sets it
        self.pid = 0
        self._first: psutil.Process | None = None
        self._process = subprocess.Popen(
            [
                *(enter_command(within, ["--pid"]) if within else []),
                *(
                    find_command("unshare") or "unshare",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    *KINDS,
                ),
                *(sys.executable, "-P", "-m", "labkit.hosts.host_init", json.dumps(host)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Wait until the host's first process reports that the host is ready.

        Raises:
            LabkitError: The host did not start; the message ends with the last line of its errors.
        """
        assert self._process.stdout is not None  # for the type checker: stdout is a pipe
        if self._process.stdout.readline().strip() != READY:
            errors = self._process.communicate()[1].strip().splitlines()
            raise LabkitError(
                f"host {self.name} did not start: {errors[-1] if errors else 'no error message'}; "
                "a testbed needs a Linux kernel with namespaces, and root with CAP_SYS_ADMIN"
            )
        # nsenter and unshare have only one child process each, so the innermost process is the
        # first process of the host.
        self._first = psutil.Process(self._process.pid).children(recursive=True)[-1]
        self.pid = self._first.pid

    def has_ended(self) -> bool:
        """Return whether the host's first process, and thus all others of the host, have ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill all processes of the host and wait until they have ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        # The process is also killed, because a stopped process does not react to the closed pipe.
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            (self._first or self._process).kill()
        # The kernel reports the end of the first process only after all other processes have ended.
        self._process.wait()
