"""The Linux namespaces of a virtual host: network, mounts, host name, processes and IPC.

The namespaces of a virtual host have no name under /run/netns. The kernel removes unnamed
namespaces when their last process ends, even by a crash.

The first process of a virtual host sets up the host and reaps orphaned processes.

    python -m labkit.hosts.host_namespaces SPECIFICATION

The first process of the host runs in its own Linux namespaces. When the first process exits, the
kernel kills all other processes in its namespaces. The kernel then removes the namespaces of the
first process with their mounts and network devices. The exit of the parent closes the pipe to the
first process's standard input. The first process exits when its standard input closes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TypedDict

import psutil

from labkit.common.errors import LabkitError
from labkit.hosts.testbed_state import find_command

READY = "ready"
CGROUPS = Path("/sys/fs/cgroup")


# Each pair contains a source path and the path at which the source is mounted.
Binds = Sequence[tuple[str, str]]


class Specification(TypedDict):
    """The properties of a virtual host."""

    name: str
    folder: str  # The entry `folder` is the path of the testbed's folder, which all hosts share.
    private: list[str]  # At each path in `private`, every host has its own folder.
    # All hosts share the folders in `shared`, even if a shared folder is inside a private folder.
    shared: list[str]
    runtime: str  # The entry `runtime` is the value of XDG_RUNTIME_DIR on the host.
    binds: Binds
    # If `tidies` is true, the host's first process removes `folder` after its parent process has
    # exited.
    tidies: bool


def prepare(host: Specification) -> None:
    """Set the host name, and mount the host's folders and files in this process's namespaces."""
    socket.sethostname(host["name"])
    stage = Path(host["folder"]) / f"stage-{host['name']}"
    stage.mkdir()
    for place in host["private"]:
        _make_private(Path(place), stage, host["shared"])
    _show_own_devices(stage)
    stage.rmdir()
    runtime = Path(host["runtime"])
    runtime.mkdir(parents=True, exist_ok=True)
    runtime.chmod(0o700)
    for source, place in host["binds"]:
        _mount("--bind", source, place)


def _make_private(place: Path, stage: Path, shared: Sequence[str]) -> None:
    """Mount an empty folder at `place`, and mount the shared folders inside it."""
    # Another private folder may already hide the folder `place`.
    if not place.is_dir():
        return
    # The function fills the new folder at `stage`, and then moves the mount to `place`. A mount
    # directly at `place` would hide the original folder, which contains the shared folders.
    _mount("-t", "tmpfs", "-o", "mode=1777", "labkit", stage)
    for path in map(Path, shared):
        if path.is_relative_to(place) and path.is_dir():
            inner = stage / path.relative_to(place)
            inner.mkdir(parents=True, exist_ok=True)
            _mount("--bind", path, inner)
    _mount("--move", stage, place)


def _show_own_devices(stage: Path) -> None:
    """Remount /sys, so that /sys/class/net lists the devices of this host only."""
    _mount("-t", "sysfs", "sysfs", stage)
    if CGROUPS.is_dir():  # The Slurm daemon slurmd needs the files of the control groups.
        _mount("--rbind", CGROUPS, stage / CGROUPS.relative_to("/sys"))
    _mount("--move", stage, "/sys")


def _mount(*words: str | Path) -> None:
    result = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"mount {' '.join(map(str, words))}: {result.stderr.strip()}")


def _collect(number: int, frame: FrameType | None) -> None:
    """Reap all children that have ended, including adopted orphan processes."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(host: Specification) -> None:
    """Run as the first process of a host until the parent exits."""
    folder = Path(host["folder"])
    # The function `prepare` may mount another folder over the path of the parent folder. The
    # process therefore opens the parent folder before it calls `prepare`.
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.chdir("/")
    prepare(host)
    signal.signal(signal.SIGCHLD, _collect)
    print(READY, flush=True)
    # `select` returns when the parent process closes its end of the pipe.
    select.select([sys.stdin], [], [])
    if host["tidies"]:
        shutil.rmtree(folder.name, ignore_errors=True, dir_fd=parent)


KINDS = ("--mount", "--uts", "--ipc", "--net", "--pid")


def enter_command(pid: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """Return the prefix that runs a command in the namespaces of the process `pid`."""
    return [find_command("nsenter") or "nsenter", "--target", str(pid), *kinds]


class HostNamespaces:
    """The Linux namespaces of one virtual host, from the host's start to its end.

    Args:
        host: Properties of the virtual host.
        within: Id of a process whose PID namespace contains the host; the host ends when this
            namespace ends. None stands for the calling process.
    """

    def __init__(self, host: Specification, within: int | None = None) -> None:
        self.name = host["name"]
        # The method `wait` sets `pid`, the PID of the host's first process. The PID is valid in the
        # PID namespace of this process.
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
                *(sys.executable, "-P", "-m", "labkit.hosts.host_namespaces", json.dumps(host)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Wait until the host's first process reports that the host is ready.

        Raises:
            LabkitError: The host did not start; the message contains the last line of the host's
                errors.
        """
        # The assertion tells the type checker that stdout is a pipe.
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != READY:
            errors = self._process.communicate()[1].strip().splitlines()
            raise LabkitError(
                f"host {self.name} did not start: {errors[-1] if errors else 'no error message'}; "
                "a testbed needs a Linux kernel with namespaces, and root with CAP_SYS_ADMIN"
            )
        # The commands nsenter and unshare have one child process each. The innermost process is the
        # host's first process.
        self._first = psutil.Process(self._process.pid).children(recursive=True)[-1]
        self.pid = self._first.pid

    def has_ended(self) -> bool:
        """Return whether the host's first process has ended, and so all processes of the host."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill all processes of the host and wait until they have ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        # A stopped process does not react to a closed pipe. The code therefore also kills the
        # host's first process.
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            (self._first or self._process).kill()
        # The kernel reports the end of a PID namespace's first process last. All other processes of
        # the namespace have ended by then.
        self._process.wait()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
