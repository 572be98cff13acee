"""Which runs lie below a folder, and why some that lie there cannot be used."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import LabkitError
from labkit.common.safe_json import is_text
from labkit.records.store import Record, checked_status, read_bytes, read_json

PARQUET = b"PAR1"  # begins and ends such a file

LINKED = "left out: it is a symbolic link; give its own path to read it"


class Found(NamedTuple):
    """A usable run directory with its records, which are read once; no metrics: not yet there."""

    path: Path
    experiment: Record
    status: Record
    metrics: Record | None


class Scan(NamedTuple):
    """What lies under a folder: usable runs, and one line for each that is not."""

    found: list[Found]
    skipped: list[str]

    @property
    def runs(self) -> list[Path]:
        """Their directories."""
        return [each.path for each in self.found]


class Folder(NamedTuple):
    """A folder with the names of the files in it, whether it is a run's, and links to folders."""

    path: str
    files: set[str]
    is_run: bool
    links: tuple[str, ...] = ()

    @property
    def odd(self) -> str:
        """What is wrong with its name; empty: nothing."""
        # No page, table or store of another tool can write such a name.
        return "" if is_text(self.path) else "its name is not UTF-8: rename it"


def folders(root: Path | str) -> Iterator[Folder]:
    """Every folder at and below root, in order; none in hidden folders and within runs."""
    root = Path(root)
    if not os.path.isdir(root):  # unlike pathlib's, no error where a name is too long
        raise LabkitError(f"no folder {root}: give the folder of runs (usually runs/) or a run")
    for path, inside, names in os.walk(root):
        files = set(names)
        # A notebook's job has a status too, but params.yaml beside it; runs lie inside.
        is_run = "experiment.json" in files or (
            "status.json" in files and "params.yaml" not in files
        )
        # In place, as os.walk wants it. What a sweep replaced lies in hidden folders.
        inside[:] = [] if is_run else sorted(name for name in inside if not name.startswith("."))
        links = tuple(name for name in inside if os.path.islink(f"{path}/{name}"))
        yield Folder(path, files, is_run, links)


def scan(root: Path | str) -> Scan:
    """Look for run directories at and below root; a run is not searched for runs inside it."""
    result = Scan([], [])
    for folder in folders(root):
        result.skipped.extend(links_left_out(folder, Path(root)))
        if not folder.is_run:
            continue
        read = read_run(folder)
        if isinstance(read, Found):
            result.found.append(read)
        else:
            result.skipped.append(left_out(folder, Path(root), read))
    return result


def left_out(folder: Folder, root: Path, reason: str) -> str:
    """The line that says that a run is left out."""
    return f"{Path(folder.path).relative_to(root.parent)} left out: {reason}"


def links_left_out(folder: Folder, root: Path) -> list[str]:
    """The lines that say which links to folders are not followed."""
    place = Path(folder.path).relative_to(root.parent)
    return [f"{place / name} {LINKED}" for name in folder.links]


def find_runs(root: Path | str) -> list[Found]:
    """The usable runs at and below root; warns, one line each, about the others."""
    result = scan(root)
    for line in result.skipped:
        warnings.warn(line, stacklevel=2)
    return result.found


def read_run(folder: Folder) -> Found | str:
    """A run's records, or one line saying why it cannot be used (half written, newer schema)."""
    path = folder.path
    if folder.odd:
        return folder.odd
    try:
        experiment = read_json(f"{path}/experiment.json")
        status = checked_status(read_json(f"{path}/status.json"), path)
        # A run that has not completed need not have metrics; but those that it has must be
        # readable.
        wanted = status["state"] == "completed" or "metrics.json" in folder.files
        metrics = read_json(f"{path}/metrics.json") if wanted else None
        for name in folder.files:
            # By its end alone: to read every history of a thousand runs takes minutes.
            if name.endswith(".parquet") and read_bytes(f"{path}/{name}", 4) != PARQUET:
                return f"{os.path.basename(path)}/{name} is torn: copy the run again"
    except LabkitError as error:
        return str(error)
    except OSError as error:  # it is not ours to read, or somebody removes the run just now
        return f"{os.path.basename(path)} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{os.path.basename(path)}/{name} {error}"
    return Found(Path(path), experiment, status, metrics)
