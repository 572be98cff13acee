"""A registry of processes and job arrays that this user started and `labkit stop` may end.

The registry is in the user's private state folder, which remains after a logout and is shared by
all login nodes. Other users may write to a runs folder, so a record in the folder may name any
process or Slurm job. labkit displays a process that a record in a runs folder names, but never
sends the process a signal.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.common.paths import state_folder
from labkit.records import store
from labkit.records.store import Record

PROCESSES, ARRAYS = "processes", "arrays"  # kinds of registry entries


@contextmanager
def registration(folder: Path) -> Iterator[None]:
    """Context manager that registers this process as the worker of a job or sweep.

    Args:
        folder: Folder of the job or sweep.
    """
    if store.ELEMENT in os.environ:  # tasks of job arrays need no entry, because Slurm ends them
        yield
        return
    entry = identity = None
    try:
        entry, identity = _process(folder), store.this_process() | {"machine": _machine()}
        store.write_json(entry, identity)
    except (OSError, LabkitError) as error:  # the run continues even without a registry entry
        print(
            f"{folder.name} cannot be registered, so labkit stop cannot end it: {error}",
            file=sys.stderr,
            flush=True,
        )
    try:
        yield
    finally:
        # The entry is removed unless a later worker in the same folder has replaced it.
        if entry is not None and identity is not None and _matches(_read(entry), identity):
            entry.unlink(missing_ok=True)


def process(folder: Path) -> Record | None:
    """Return a job's or sweep's registered process, or None if it does not run on this machine."""
    entry = _read(_process(folder))
    return entry if entry and entry.get("machine") == _machine() else None


def add_array(folder: Path, number: str) -> None:
    """Register a Slurm job array that executes the notebooks of a sweep."""
    entry = _entry(ARRAYS, folder)
    store.write_json(entry, {"arrays": [*arrays(folder), number]})


def arrays(folder: Path) -> list[str]:
    """Return the numbers of the Slurm job arrays that this user submitted for a sweep."""
    return list((_read(_entry(ARRAYS, folder)) or {}).get("arrays", []))


def forget_arrays(folder: Path) -> None:
    """Remove a sweep's job arrays from the registry, when none of their tasks are left in Slurm."""
    _entry(ARRAYS, folder).unlink(missing_ok=True)


def _machine() -> str:
    """Return an identifier of this machine, its current boot, and this process's pid namespace."""
    # A container may share a state folder with its host, and Linux reuses process numbers after a
    # reboot.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _process(folder: Path) -> Path:
    # Machines that share a home folder may have different local folders under the same path.
    return _entry(PROCESSES, folder, _machine())


def _entry(kind: str, folder: Path, machine: str = "") -> Path:
    # The path is resolved, because other callers may use another working directory, or a symbolic
    # link.
    path = f"{folder.resolve()}{machine}".encode("utf-8", "surrogateescape")
    return state_folder("registry") / f"{kind}-{hashlib.sha256(path).hexdigest()}.json"


def _read(entry: Path) -> Record | None:
    return store.read_json(entry) if entry.exists() else None


def _matches(one: Record | None, other: Record) -> bool:
    return one is not None and all(one.get(name) == value for name, value in other.items())
