"""The inputs of a run: repository, source files, data files and packages.

A process records the files that Python opens (`labkit.common.reads`), from the notebook's folder,
the working folder, their repository, and the folder of data sets. Labkit's own source is not
included, because its fingerprint is recorded elsewhere. The record does not contain files that a
library opens in C or C++, files in other folders, and files that a cell with `%%px` reads. The
record also omits new files in a folder that the notebook lists.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from labkit.common import imports, reads
from labkit.common.canonical_json import digest
from labkit.common.files import open_file, repository_folder
from labkit.common.privacy import scrub
from labkit.records import store
from labkit.records.shape import PROVENANCE
from labkit.records.store import Record

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON

FILE = PROVENANCE
MAX_FILES = 1_000  # a record lists at most `MAX_FILES` files, and counts the others
# A file of more than LARGE bytes is identified by its size and its modification time.
LARGE = 2**28
MAX_DIFF_BYTES = 2**15  # of a longer diff, the record contains only the checksum
GIT_TIMEOUT = 10.0  # seconds
# The checksum of a file that changed while the run used it is CHANGED, which equals no checksum.
CHANGED = "changed during the run"
_NAMED = 6  # greatest number of inputs that a sentence names
_INSTALLED = re.compile(r"(.+?)-([^-]+?)(?:-py[\d.]+)?\.(?:dist|egg)-info")
_OWN = str(Path(__file__).parents[1]) + os.sep


class Inputs(NamedTuple):
    """The inputs of a process: the checksum of each file, and the imported top-level modules."""

    files: dict[str, str]
    imports: set[str]


# `_OF_RANKS` contains the inputs that the ranks have reported to this process.
_OF_RANKS = Inputs({}, set())


# --- files ---------------------------------------------------------------------------------------


def inputs() -> Inputs:
    """Return the files that this process has read, and the names of the modules it has imported."""
    places, job = _places(), os.environ.get("LABKIT_JOB")
    stamps = {path: reads.stamp(path) for path in _module_files(tuple(places.values()))}
    files: dict[str, str] = {}
    for path, known in (stamps | reads.read).items():
        name = _name(path, places)
        # A file that the process itself has written is a result.
        if name and path not in reads.written and not (job and path.startswith(f"{job}/")):
            now = reads.stamp(path)
            files[name] = _checksum(path, now) if now and now == known else CHANGED
    tops = {name.partition(".")[0] for name in list(sys.modules)} - sys.stdlib_module_names
    return Inputs(files, tops - {"__main__", "labkit"})


def add(of_rank: Inputs) -> None:
    """Add the inputs that a rank has reported to those of this process."""
    _OF_RANKS.files.update(_merged(_OF_RANKS.files, of_rank.files))
    _OF_RANKS.imports.update(of_rank.imports)


def forget() -> None:
    """Forget all inputs of this process and its ranks, because a forked process begins."""
    reads.forget()
    _OF_RANKS.files.clear()
    _OF_RANKS.imports.clear()


def _merged(first: Mapping[str, str], later: Mapping[str, str]) -> dict[str, str]:
    """Merge checksums; in a job, a file with two checksums has changed during the run."""
    differ = {name for name in first.keys() & later.keys() if first[name] != later[name]}
    conflicts = dict.fromkeys(differ, CHANGED) if "LABKIT_JOB" in os.environ else {}
    return {**first, **later, **conflicts}


def _module_files(folders: tuple[str, ...]) -> Iterator[str]:
    """Yield the source files in some folders from which this process has imported modules."""
    for module in list(sys.modules.values()):
        # The code reads the attribute from the dict, because modules may define `__getattr__`.
        file = module.__dict__.get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.startswith(folders):
            yield os.path.abspath(file)


def _places(notebook: Path | None = None) -> dict[str, str]:
    """Return the folders whose files are recorded, by the prefix that their files' names have."""
    extra = imports.split_folders(imports.extra_folders())
    here = str(notebook.resolve().parent) if notebook else (extra or [os.getcwd()])[0]
    repository = repository_folder(Path(here))
    places = {"": here, "{data}/": os.environ.get("LABKIT_DATA"), "{cwd}/": os.getcwd()}
    places |= {"{repository}/": str(repository) if repository else None}
    return {prefix: os.path.abspath(path) for prefix, path in places.items() if path}


def _name(path: str, places: Mapping[str, str]) -> str:
    """Return a file's name in records; "" for a hidden file, and for a file outside all folders."""
    if path.startswith(_OWN) or "site-packages/" in path:
        return ""
    for prefix, folder in places.items():
        if path.startswith(inside := folder.rstrip("/") + "/"):
            name = path[len(inside) :]
            return "" if "/." in f"/{name}" else prefix + name
    return ""


def _path(name: str, places: Mapping[str, str]) -> str:
    """Return the path of a file with this name in a record."""
    prefix = next((prefix for prefix in places if prefix and name.startswith(prefix)), "")
    return os.path.join(places[prefix], name[len(prefix) :])


@lru_cache(4 * MAX_FILES)
def _checksum(path: str, known: reads.Stamp) -> str:
    size, modified, _ = known
    if size > LARGE:
        return f"{size} bytes of {modified}"
    # The function `open_file` opens the file relative to its folder, so that `reads` ignores it.
    try:
        with os.fdopen(open_file(os.path.realpath(path)), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:  # another process has removed the file, or has revoked the permission
        return CHANGED


# --- repository and packages ---------------------------------------------------------------------


def repository() -> dict[str, JSON]:
    """Return commit and uncommitted changes of the notebook's repository; {} without one."""
    folder = repository_folder(Path(_places()[""]))
    commit = _git(folder, "rev-parse", "HEAD") if folder else None
    if not commit:
        return {}
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    record: dict[str, JSON] = {"commit": commit.decode().strip()}
    if diff:
        record["diff_sha256"] = hashlib.sha256(diff).hexdigest()
    if diff and len(diff) <= MAX_DIFF_BYTES:
        record["diff"] = scrub(diff.decode(errors="replace"))
    return record


def _git(folder: Path | None, *arguments: str) -> bytes | None:
    """Return the output of a git command; None if git is missing, fails or takes too long."""
    # git refuses repositories of other users. Settings of the repository must not start programs.
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=GIT_TIMEOUT,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def packages() -> dict[str, JSON]:
    """Return the version of each installed package, from the names of the metadata folders."""
    # The module importlib.metadata would read a file of each package, which takes a second.
    found: dict[str, JSON] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # sys.path may contain files and missing folders
            continue
        for match in filter(None, map(_INSTALLED.fullmatch, names)):
            found.setdefault(_normalized(match[1]), match[2])
    return dict(sorted(found.items()))


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Return the packages that contain each top-level module."""
    from importlib.metadata import packages_distributions

    return packages_distributions()


# --- records -------------------------------------------------------------------------------------


def write(directory: Path, begin: bool = False) -> None:
    """Write the inputs of this process and its ranks to a run's or job's folder.

    Args:
        directory: Folder of the run or job.
        begin: Whether the run or job begins; only then, the repository and the executed cells are
            recorded.
    """
    path, own = directory / FILE, inputs()
    previous = store.read_json(path) if path.exists() else {}
    if begin or not previous:
        kept: Record = {"repository": repository(), "cells": _executed_cells()}
    else:
        kept = {name: previous.get(name) for name in ("repository", "cells")}
    files = sorted(_merged(_OF_RANKS.files, own.files).items())
    record: Record = {
        **kept,
        "files": dict(files[:MAX_FILES]),
        "files_omitted": max(0, len(files) - MAX_FILES),
        "imports": sorted(own.imports | _OF_RANKS.imports),
        "packages": packages(),
    }
    if previous != {"schema": store.SCHEMA} | record:
        store.write_json(path, record)


def _executed_cells() -> str | None:
    """Return the checksum of the cells that this job has begun so far; None outside of jobs."""
    if "LABKIT_JOB" not in os.environ or "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    return digest([*shell.history_manager.input_hist_raw]) if shell else None


def read(directory: Path) -> Record:
    """Return the record of a run's inputs, or else of its job's; {} if there is none.

    Raises:
        LabkitError: The record is damaged.
    """
    for folder in (directory, directory.parent):
        if (folder / FILE).exists():
            return store.read_json(folder / FILE)
    return {}


def changes(directory: Path, notebook: Path | None = None, cells: bool = False) -> list[str]:
    """Return a phrase for each input that has changed since a run or job recorded its inputs.

    A changed package counts only if the run has imported a module of the package. A removed package
    counts if a module with its name was imported.

    Args:
        directory: Folder of the run or job.
        notebook: Notebook whose folder contains the files; None: the notebook of this process.
        cells: Whether the cells that this process has executed must be the recorded ones.
    """
    record, places = read(directory), _places(notebook)
    if not record:
        return []
    phrases = []
    for name, checksum in record["files"].items():
        path = _path(name, places)
        now = reads.stamp(path)
        if now is None:
            phrases.append(f"{name} is missing")
        elif CHANGED in (checksum, present := _checksum(path, now)) or present != checksum:
            phrases.append(f"{name} {CHANGED if checksum == CHANGED else 'has changed'}")
    if cells and record.get("cells") != _executed_cells():
        phrases.append("the notebook's cells have changed")
    return phrases + _changed_packages(record)


def _changed_packages(record: Record) -> list[str]:
    before, now = record["packages"], packages()
    changed = {name for name, version in before.items() if now.get(name) != version} - {"labkit"}
    used = {*map(_normalized, record["imports"])}
    # Most packages have the name of their module. The names of all others are slow to read.
    if changed - used:
        names = (name for top in record["imports"] for name in _distributions().get(top, ()))
        used.update(map(_normalized, names))
    return [
        f"{name} {before[name]} is now {now.get(name, 'missing')}"
        for name in sorted(changed & used)
    ]


def differing_inputs(records: Iterable[Record]) -> str:
    """Return a phrase that names inputs with different contents in records of runs, or ""."""
    values: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in _facts(record).items():
            # The keys of a dict keep the order of the runs, and each value only once.
            values.setdefault(name, {})[value] = None
    differing = {name: [*each] for name, each in values.items() if len(each) > 1}
    phrases = [_differing_input(name, each) for name, each in differing.items()]
    more = [f"{len(phrases) - _NAMED} more"] if len(phrases) > _NAMED else []
    return ", ".join([*phrases[:_NAMED], *more])


def _facts(record: Record) -> dict[str, str]:
    """Return a short text for each recorded input, by its name in a comparison."""
    commit = record.get("repository") or {}
    facts: dict[str, str] = {}
    if commit:
        facts["commit"] = str(commit.get("commit", "unknown"))[:9]
        facts["uncommitted changes"] = str(commit.get("diff_sha256", "none"))[:9]
    files: dict[str, str] = record.get("files") or {}
    facts |= {f"`{name}`": checksum for name, checksum in files.items()}
    return facts | (record.get("packages") or {})


def _differing_input(name: str, values: Sequence[str]) -> str:
    if name.startswith("`"):
        return f"{name} ({len(values)} versions)"
    return f"{name} {' and '.join(values)}" if len(values) < 4 else f"{name} ({len(values)} values)"
