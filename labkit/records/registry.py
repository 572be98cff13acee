"""What this user has started: only that is ended by `labkit stop`.

It stands in the private state folder, which outlives a login and which login nodes share. A record
in a runs folder may name any process or job of Slurm's, for whoever may write there; what it names
is shown, and never signalled.
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

PROCESSES, ARRAYS = "processes", "arrays"  # kinds of entries


@contextmanager
def registration(folder: Path) -> Iterator[None]:
    """Name this process as the one that works on a job or sweep, as long as the block runs.

    Args:
        folder: of the job or sweep.
    """
    if store.ELEMENT in os.environ:  # Slurm ends it
        yield
        return
    entry = this = None
    try:
        entry, this = _process(folder), store.this_process() | {"machine": _machine()}
        store.write_json(entry, this)
    except (OSError, LabkitError) as error:  # to run is worth more than to be stopped from afar
        print(f"labkit stop will not end {folder.name}: {error}", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        # A later attempt in the same folder may have taken the entry.
        if entry is not None and this is not None and _same(_read(entry), this):
            entry.unlink(missing_ok=True)


def process(folder: Path) -> Record | None:
    """The process that works, or has worked until it was killed, on a job or sweep."""
    found = _read(_process(folder))
    return found if found and found.get("machine") == _machine() else None


def add_array(folder: Path, number: str) -> None:
    """Note that Slurm runs members of a sweep as the job array of this number."""
    entry = _entry(ARRAYS, folder)
    store.write_json(entry, {"arrays": [*arrays(folder), number]})


def arrays(folder: Path) -> list[str]:
    """The numbers of the job arrays that this user has submitted for a sweep."""
    return list((_read(_entry(ARRAYS, folder)) or {}).get("arrays", []))


def forget_arrays(folder: Path) -> None:
    """Note that no element of a sweep is left in Slurm's queue."""
    _entry(ARRAYS, folder).unlink(missing_ok=True)


def _machine() -> str:
    """This machine since its start, and the numbers of processes that hold here."""
    # Containers and hosts may share a state folder, and a reboot gives numbers anew.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _process(folder: Path) -> Path:
    # Machines that share a home may have folders of the same path on disks of their own.
    return _entry(PROCESSES, folder, _machine())


def _entry(kind: str, folder: Path, machine: str = "") -> Path:
    # Resolved: who asks may stand in another folder, or come by a link.
    path = f"{folder.resolve()}{machine}".encode("utf-8", "surrogateescape")
    return state_folder("registry") / f"{kind}-{hashlib.sha256(path).hexdigest()}.json"


def _read(entry: Path) -> Record | None:
    return store.read_json(entry) if entry.exists() else None


def _same(one: Record | None, other: Record) -> bool:
    return one is not None and all(one.get(name) == value for name, value in other.items())
