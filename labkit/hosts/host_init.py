"""The first process of a virtual host, which sets up the host and reaps orphaned processes.

    python -m labkit.hosts.host_init SPECIFICATION

The first process of the host runs in its own Linux namespaces. When the first process exits, the
kernel kills all other processes in its namespaces. The kernel then removes the namespaces of the
first process with their mounts and network devices. When the parent exits, the pipe to the first
process's standard input closes, and the first process exits too.
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

READY = "ready"
CGROUPS = Path("/sys/fs/cgroup")


Binds = Sequence[tuple[str, str]]  # pairs: a source path, and the path at which it is mounted


class Specification(TypedDict):
    """The properties of a virtual host."""

    name: str
    folder: str  # the folder of the testbed, which is the same on all hosts
    private: list[str]  # paths at which each host has its own folder
    shared: list[str]  # folders that all hosts share although they are inside private folders
    runtime: str  # XDG_RUNTIME_DIR of the host
    binds: Binds
    tidies: bool  # whether the host's first process removes `folder` when its parent has exited


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
    if not place.is_dir():  # `place` is hidden if another private folder was mounted before
        return
    # The new folder is filled at `stage` before it is moved to `place`, because it hides the
    # original folder with the shared folders.
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
    if CGROUPS.is_dir():  # slurmd needs the files of the control groups
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
    # The parent folder is opened before `prepare`, because a mount of `prepare` may hide the parent
    # folder's path.
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.chdir("/")
    prepare(host)
    signal.signal(signal.SIGCHLD, _collect)
    print(READY, flush=True)
    # `select` returns when the parent's end of the pipe is closed.
    select.select([sys.stdin], [], [])
    if host["tidies"]:
        shutil.rmtree(folder.name, ignore_errors=True, dir_fd=parent)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
