"""The first process of a host: makes what only this host has, then collects who ends.

    python -m labkit.hosts.host_init SPECIFICATION

It runs in namespaces of its own. When it ends, the system ends every process in them, and with the
last process they are gone themselves, with their mounts and their ends of links. It ends when the
process that started it does: the pipe that it reads is then closed.
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


Binds = Sequence[tuple[str, str]]  # what stands in the place of what


class Specification(TypedDict):
    """What a host is to be."""

    name: str
    folder: str  # the testbed's, which all hosts see
    private: list[str]  # folders of which this host has its own
    shared: list[str]  # folders in them that are the machine's nevertheless
    runtime: str  # its XDG_RUNTIME_DIR
    binds: Binds
    tidies: bool  # whether this process removes the folder when it has lost who started it


def prepare(host: Specification) -> None:
    """Give this process's namespaces their name, folders and files."""
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
    """An empty folder in the place of one, with those in it that are shared."""
    if not place.is_dir():  # it lies in one that is private already
        return
    # Furnished aside, and then moved over the old one, out of which it is furnished.
    _mount("-t", "tmpfs", "-o", "mode=1777", "labkit", stage)
    for path in map(Path, shared):
        if path.is_relative_to(place) and path.is_dir():
            inner = stage / path.relative_to(place)
            inner.mkdir(parents=True, exist_ok=True)
            _mount("--bind", path, inner)
    _mount("--move", stage, place)


def _show_own_devices(stage: Path) -> None:
    """Let /sys/class/net list this host's devices; /sys keeps its control groups."""
    _mount("-t", "sysfs", "sysfs", stage)
    if CGROUPS.is_dir():  # slurmd ends where it finds none
        _mount("--rbind", CGROUPS, stage / CGROUPS.relative_to("/sys"))
    _mount("--move", stage, "/sys")


def _mount(*words: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mount {' '.join(map(str, words))}: {done.stderr.strip()}")


def _collect(number: int, frame: FrameType | None) -> None:
    """Take note of children that have ended, those that others have left to this one included."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(host: Specification) -> None:
    """Be the first process of a host until whoever started it has ended."""
    folder = Path(host["folder"])
    # Opened while it can be seen: afterwards another folder may stand in its place.
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.chdir("/")
    prepare(host)
    signal.signal(signal.SIGCHLD, _collect)
    print(READY, flush=True)
    select.select([sys.stdin], [], [])  # nothing is ever written: it is closed
    if host["tidies"]:
        shutil.rmtree(folder.name, ignore_errors=True, dir_fd=parent)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
