"""A search for runs in folders, and a registry of processes that `labkit stop` may end.

The registry lists this user's processes and job arrays, which `labkit stop` may end.

The registry is in the user's private state folder. The state folder remains after a logout, and all
login nodes share the folder. Other users may write to a runs folder, so its records may name any
process or Slurm job. Therefore labkit only displays the processes in such records, and never sends
them a signal.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from labkit.common.canonical_json import is_text
from labkit.common.errors import LabkitError
from labkit.common.files import state_folder
from labkit.records import store
from labkit.records.store import Record, checked_status, read_bytes, read_json

PROCESSES, ARRAYS = "processes", "arrays"


@contextmanager
def registration(folder: Path) -> Iterator[None]:
    """Register this process as the worker of a job or sweep while the context is active.

    Args:
        folder: Folder of the job or sweep.
    """
    # Tasks of Slurm job arrays need no registry entry, because Slurm ends them.
    if store.ELEMENT in os.environ:
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
        # A process removes its registry entry unless a later process in the same folder has
        # replaced the entry.
        if entry is not None and identity is not None and _matches(_read(entry), identity):
            entry.unlink(missing_ok=True)


def process(folder: Path) -> Record | None:
    """Return the registered process of a job or sweep, or None if this machine has none."""
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
    """Remove a sweep's job arrays from the registry once Slurm has none of their tasks left."""
    _entry(ARRAYS, folder).unlink(missing_ok=True)


def _machine() -> str:
    """Return an identifier of this machine, its current boot, and this process's pid namespace."""
    # The identifier includes the boot, because Linux reuses process numbers after a reboot. The
    # identifier includes the pid namespace, because containers share state folders with hosts.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _process(folder: Path) -> Path:
    # The registry key of a folder includes the machine. Machines with a shared home folder may have
    # different local folders at one path.
    return _entry(PROCESSES, folder, _machine())


def _entry(kind: str, folder: Path, machine: str = "") -> Path:
    # The resolved path identifies the folder for all processes. Processes may have another working
    # directory or use a symbolic link to the folder.
    path = f"{folder.resolve()}{machine}".encode("utf-8", "surrogateescape")
    return state_folder("registry") / f"{kind}-{hashlib.sha256(path).hexdigest()}.json"


def _read(entry: Path) -> Record | None:
    return store.read_json(entry) if entry.exists() else None


def _matches(one: Record | None, other: Record) -> bool:
    return one is not None and all(one.get(name) == value for name, value in other.items())


PARQUET = b"PAR1"  # A Parquet file starts and ends with the bytes "PAR1".

LINKED = "left out, because it is a symbolic link; give the path of the link itself to read it"


class RunRecords(NamedTuple):
    """The directory and records of a usable run; `metrics` is None before it has results."""

    path: Path
    experiment: Record
    status: Record
    metrics: Record | None


class Scan(NamedTuple):
    """The result of a search for runs: the usable runs, and one line of text per unusable run."""

    usable: list[RunRecords]
    skipped: list[str]

    @property
    def runs(self) -> list[Path]:
        """The directories of the usable runs."""
        return [records.path for records in self.usable]


class Folder(NamedTuple):
    """A folder with the names of its files and linked subfolders, and whether it is a run."""

    path: str
    files: set[str]
    is_run: bool
    links: tuple[str, ...] = ()

    @property
    def name_problem(self) -> str:
        """The reason why the folder's name cannot be used; empty if the name is valid."""
        # HTML pages and tables cannot contain a folder name that is not UTF-8.
        return "" if is_text(self.path) else "the folder's name is not UTF-8; rename the folder"


def folders(root: Path | str) -> Iterator[Folder]:
    """Yield `root` and the folders below it in order, except hidden ones, and folders inside runs.

    Raises:
        LabkitError: If the folder does not exist.
    """
    root = Path(root)
    # The method `pathlib.Path.is_dir` raises OSError for a very long name, but `os.path.isdir`
    # returns False.
    if not os.path.isdir(root):
        raise LabkitError(
            f"there is no folder {root}; give the folder of runs (usually runs/) or a run"
        )
    for path, subfolders, names in os.walk(root):
        files = set(names)
        # A folder with status.json and params.yaml belongs to a notebook job. A notebook job
        # contains runs, but the job is not a run.
        is_run = "experiment.json" in files or (
            "status.json" in files and "params.yaml" not in files
        )
        # The function `os.walk` skips a subfolder only if its list of subfolders is changed in
        # place. Hidden folders are skipped, because a sweep moves the runs that it replaces to
        # hidden folders.
        subfolders[:] = (
            [] if is_run else sorted(name for name in subfolders if not name.startswith("."))
        )
        links = tuple(name for name in subfolders if os.path.islink(f"{path}/{name}"))
        yield Folder(path, files, is_run, links)


def scan(root: Path | str) -> Scan:
    """Search a folder and all folders below it for runs, except folders inside runs."""
    result = Scan([], [])
    for folder in folders(root):
        result.skipped.extend(skipped_links(folder, Path(root)))
        if not folder.is_run:
            continue
        read = read_run(folder)
        if isinstance(read, RunRecords):
            result.usable.append(read)
        else:
            result.skipped.append(skip_message(folder, Path(root), read))
    return result


def skip_message(folder: Folder, root: Path, reason: str) -> str:
    """Return a line of text that reports an unusable run and the reason."""
    return f"{Path(folder.path).relative_to(root.parent)} left out: {reason}"


def skipped_links(folder: Folder, root: Path) -> list[str]:
    """Return a line of text for each link to a folder, because a scan follows no links."""
    path = Path(folder.path).relative_to(root.parent)
    return [f"{path / name} {LINKED}" for name in folder.links]


def find_runs(root: Path | str) -> list[RunRecords]:
    """Return the usable runs in a folder, and warn with one line about each unusable run."""
    result = scan(root)
    for line in result.skipped:
        warnings.warn(line, stacklevel=2)
    return result.usable


def read_run(folder: Folder) -> RunRecords | str:
    """Return a run's records, or a text that says why the run cannot be used."""
    path = folder.path
    if folder.name_problem:
        return folder.name_problem
    try:
        experiment = read_json(f"{path}/experiment.json")
        status = checked_status(read_json(f"{path}/status.json"), path)
        # A run that has not completed may lack metrics. A run is damaged if its metrics file exists
        # but cannot be read.
        has_metrics = status["state"] == "completed" or "metrics.json" in folder.files
        metrics = read_json(f"{path}/metrics.json") if has_metrics else None
        for name in folder.files:
            # Only the last bytes of each Parquet file are checked, because reading 1000 whole
            # histories would take minutes.
            if name.endswith(".parquet") and read_bytes(f"{path}/{name}", 4) != PARQUET:
                return f"{os.path.basename(path)}/{name} is truncated; copy the run again"
    except LabkitError as error:
        return str(error)
    except OSError as error:  # permission is denied, or another process removes the run
        return f"{os.path.basename(path)} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{os.path.basename(path)}/{name} {error}"
    return RunRecords(Path(path), experiment, status, metrics)
