"""Which runs lie below a folder, and why some that lie there cannot be used."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import LabkitError
from labkit.records.store import read_json, read_status

PARQUET = b"PAR1"  # begins and ends such a file


class Scan(NamedTuple):
    """What lies under a folder: usable run directories, and one line for each that is not."""

    runs: list[Path]
    skipped: list[str]


def scan(root: Path | str) -> Scan:
    """Look for run directories at and below root; a run is not searched for runs inside it."""
    root = Path(root)
    if not root.is_dir():
        raise LabkitError(f"no folder {root}: give the folder of runs (usually runs/) or a run")
    found = Scan([], [])
    for folder, folders, files in os.walk(root):
        # A notebook's job has a status too, but params.yaml beside it; runs lie inside.
        is_run = "experiment.json" in files or (
            "status.json" in files and "params.yaml" not in files
        )
        if not is_run:
            # In place, as os.walk wants it. What a sweep replaced lies in hidden folders.
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            continue
        folders.clear()
        reason = why_unusable(Path(folder))
        if reason is None:
            found.runs.append(Path(folder))
        else:
            found.skipped.append(f"{Path(folder).relative_to(root.parent)} left out: {reason}")
    return found


def find_runs(root: Path | str) -> list[Path]:
    """The usable run directories at and below root; warns, one line each, about the others."""
    found = scan(root)
    for line in found.skipped:
        warnings.warn(line, stacklevel=2)
    return found.runs


def why_unusable(directory: Path) -> str | None:
    """One line saying why a run directory cannot be used (half written, newer schema), or None."""
    try:
        read_json(directory / "experiment.json")
        # A run that has not completed need not have metrics; but those that it has must be
        # readable.
        completed = read_status(directory)["state"] == "completed"
        if completed or (directory / "metrics.json").exists():
            read_json(directory / "metrics.json")
        # By its end alone: to read every history of a thousand runs takes minutes.
        torn = [path.name for path in directory.glob("*.parquet") if not _is_whole(path)]
    except LabkitError as error:
        return str(error)
    except OSError as error:  # it is not ours to read, or somebody removes the run just now
        return f"{directory.name} cannot be read: {error.strerror}"
    return f"{directory.name}/{torn[0]} is torn: copy the run again" if torn else None


def _is_whole(path: Path) -> bool:
    """Whether a Parquet file has its end, without which nothing of it can be read."""
    if not path.is_file():  # a pipe would be waited for
        return False
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - len(PARQUET)))
        return file.read() == PARQUET
