"""Namespaces that a process holds: of its network, mounts, host name, processes, shared memory.

They have no name under /run/netns, so that nothing can be left of them: they are gone with their
last process, however it ends.
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
from labkit.hosts.requirements import found

KINDS = ("--mount", "--uts", "--ipc", "--net", "--pid")


def entering(pid: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """The words before a command that is to run in the namespaces of a process."""
    return [found("nsenter") or "nsenter", "--target", str(pid), *kinds]


class Space:
    """The namespaces of one host, from its start to its end.

    Args:
        host: what it is to be.
        within: the process in whose namespace of processes it lies: it ends with that one.
    """

    def __init__(self, host: Specification, within: int | None = None) -> None:
        self.name = host["name"]
        self.pid = 0  # of its first process, as this process sees it; once it is ready
        self._first: psutil.Process | None = None
        self._process = subprocess.Popen(
            [
                *(entering(within, ["--pid"]) if within else []),
                *(found("unshare") or "unshare", "--fork", "--kill-child", "--mount-proc", *KINDS),
                *(sys.executable, "-P", "-m", "labkit.hosts.host_init", json.dumps(host)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Wait until it is made. Raises: LabkitError, with what could not be."""
        assert self._process.stdout is not None  # for the type checker: pipes were asked for
        if self._process.stdout.readline().strip() != READY:
            said = self._process.communicate()[1].strip().splitlines()
            raise LabkitError(
                f"host {self.name} did not start: {said[-1] if said else 'it said nothing'}; "
                "a testbed needs a Linux kernel with namespaces, and root with CAP_SYS_ADMIN"
            )
        # Each of unshare and nsenter has one child; the last of them is the first inside.
        self._first = psutil.Process(self._process.pid).children(recursive=True)[-1]
        self.pid = self._first.pid

    def has_ended(self) -> bool:
        """Whether its first process has ended, and with it all of them."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End all its processes; they are gone when this returns."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        # Not only by the pipe: who is stopped does not read.
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            (self._first or self._process).kill()
        # The system tells of the end of a first process when all the others have ended.
        self._process.wait()
