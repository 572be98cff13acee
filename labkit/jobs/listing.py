"""Tables of the sweeps, jobs and runs in a folder, for the terminal."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import LabkitError
from labkit.common.files import cache_folder, fingerprint
from labkit.common.terminal import fit, text_width
from labkit.common.units import duration_text
from labkit.jobs.elements import Elements
from labkit.jobs.sweep import manifest
from labkit.records import store
from labkit.records.folders import Folder, folders, read_run, skip_message, skipped_links
from labkit.records.run import Run, key_metrics, run_from_records

LEAST = 500  # A cache saves time only for at least `LEAST` folders.
CAUSE_WIDTH = 80


class Entry(NamedTuple):
    """A sweep, job or run of a listing; its fields are those of `labkit ls --json`.

    Attributes:
        name: Path below the listed folder.
        state: State, see `store.STATES`.
        kind: "sweep", "job" or "run".
        seconds: Duration in seconds, for a running process until now; None if it is unknown.
        accuracy: Accuracy on held-out data, from 0 to 1; None without this metric.
        samples_per_second: Training speed; None without this metric, and if the equivalence check
            failed.
        equivalence: Verdict of the equivalence check; "" without check.
        cause: Cause of a failure or interruption. For a sweep, counts of its notebook runs by
            state.
        rank: First failed rank, or None.
    """

    name: str
    state: str
    kind: str = "job"
    seconds: float | None = None
    accuracy: float | None = None
    samples_per_second: float | None = None
    equivalence: str = ""
    cause: str = ""
    rank: int | None = None

    @property
    def row(self) -> tuple[str, ...]:
        """The texts of a table row, in the order of HEAD."""
        withheld = "withheld" if self.equivalence == "failed" else ""
        speed = self.samples_per_second
        first_line = self.cause.split("\n")[0]
        cause = first_line if self.rank is None else f"rank {self.rank}: {first_line}"
        return (
            self.name,
            self.state,
            "" if self.seconds is None else duration_text(self.seconds),
            "" if self.accuracy is None else f"{self.accuracy:.2%}",
            withheld if speed is None else f"{speed:,.0f}",
            self.equivalence,
            cause if len(cause) <= CAUSE_WIDTH else f"{cause[: CAUSE_WIDTH - 1]}…",
        )


class ListingCache:
    """A cache of entries, one per ended run, with the sizes and times of the run's files.

    The cache is in the user's cache folder, not in the folder of runs. Another user's folder of
    runs could contain a forged cache. A cache file is rebuilt if it is missing, damaged or from
    another labkit version. If the cache cannot be written, all runs are read each time.

    Args:
        root: Folder whose runs are listed.
    """

    def __init__(self, root: Path) -> None:
        self._name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
        self._made_by = fingerprint()
        self._known = self._read()
        self._now: dict[str, tuple[str, Entry]] = {}

    def entry(self, name: str, folder: Folder, read: Callable[[], Entry | str]) -> Entry | str:
        """Return a run's cached entry if its files are unchanged; otherwise, return `read()`."""
        stamp = _stamp(folder)
        cached_stamp, cached_entry = self._known.get(name, ("", Entry("", "")))
        if cached_stamp == stamp:
            self._now[name] = stamp, cached_entry
            return cached_entry
        entry = read()
        if not isinstance(entry, str) and entry.state in store.END_STATES:
            self._now[name] = stamp, entry
        return entry

    def save(self) -> None:
        """Write the current entries to the cache file if they differ from the cached entries."""
        if self._now != self._known:
            text = json.dumps({"made_by": self._made_by, "rows": self._now})
            # The listing also works if the cache cannot be written.
            with suppress(OSError, LabkitError):
                store.write_atomically(self._file(), text)

    def _file(self) -> Path:
        return cache_folder("listings") / f"{self._name}.json"

    def _read(self) -> dict[str, tuple[str, Entry]]:
        try:
            cached = json.loads(self._file().read_bytes())
            if cached["made_by"] != self._made_by:
                return {}
            rows = cached["rows"].items()
            return {name: (str(stamp), Entry(*fields)) for name, (stamp, fields) in rows}
        except (OSError, LabkitError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _stamp(folder: Folder) -> str:
    """Return a text with name, modification time, size and inode of each file in a folder."""
    entries = []
    for name in sorted(folder.files):
        try:
            file = os.stat(f"{folder.path}/{name}", follow_symlinks=False)
        except OSError:  # The file is missing if another process is removing the run.
            continue
        entries.append(f"{name} {file.st_mtime_ns} {file.st_size} {file.st_ino}")
    return "\n".join(entries)


HEAD = ("name", "state", "duration", "accuracy", "samples/s", "equivalence", "cause")


def jobs_and_runs(root: Path) -> tuple[list[Entry], list[str]]:
    """Return one entry per sweep, job and run below `root`, and one message per bad record."""
    skipped: list[str] = []
    entries: dict[str, Entry] = {}
    all_folders = list(folders(root))
    slurm = Elements()
    listed = ListingCache(root) if len(all_folders) >= LEAST else None
    for folder in all_folders:
        name = _name(folder.path, root)
        skipped += skipped_links(folder, root)
        try:
            if folder.is_run:
                # Each record is dropped after its entry is created. Thousands of records would
                # fill the memory and slow down the garbage collector.
                read = partial(_read, folder, name, slurm)
                entry = read() if listed is None else listed.entry(name, folder, read)
                if isinstance(entry, str):
                    skipped.append(skip_message(folder, root, entry))
                else:
                    entries[folder.path] = entry
            elif folder.name_problem and not folder.files.isdisjoint(
                ("params.yaml", manifest.FILE)
            ):
                skipped.append(skip_message(folder, root, folder.name_problem))
                continue
            if "params.yaml" in folder.files:
                entries[folder.path] = job_entry(Path(folder.path), name, slurm)
            if manifest.FILE in folder.files:
                entries |= sweep_entries(Path(folder.path), name, slurm)
        except LabkitError as error:
            skipped.append(f"{name} left out: {error}")
    if listed is not None:
        listed.save()
    # Entries are sorted by path. Each sweep is followed by its jobs, and each job by its runs.
    paths = sorted(entries, key=lambda path: path.split("/"))
    return [entries[path] for path in paths], skipped


def _read(folder: Folder, name: str, slurm: Elements) -> Entry | str:
    """Return the entry of a run, or the reason why it has no entry."""
    read = read_run(folder)
    return read if isinstance(read, str) else run_entry(run_from_records(read), name, slurm)


def _name(path: str, root: Path) -> str:
    """Return a path relative to the folder `root`."""
    # Paths are sliced as strings, because pathlib would take as long as reading a record.
    return path[len(str(root)) + 1 :] if path != str(root) else root.name


def sweep_entries(path: Path, name: str, slurm: Elements) -> dict[str, Entry]:
    """Return a dict from path to entry: the sweep, with job counts by state, and unstarted jobs."""
    status = manifest.read(path)
    states = manifest.states(path, status, slurm.present_status)
    total = sum(states.values())
    counts = [f"{states[state]} {state}" for state in store.STATES if states[state]]
    cause = f"{total} members: {', '.join(counts)}"
    entries = {
        str(path): Entry(name, status["state"], "sweep", seconds=elapsed(status), cause=cause)
    }
    for member in status["members"]:
        job = path / member["folder"]
        if not os.path.exists(job):
            entries[str(job)] = Entry(f"{name}/{job.name}", "queued")
    return entries


def sweep_members(path: Path) -> list[store.Record]:
    """Return one record per notebook run of a sweep, for `labkit sweep --json`."""
    members: list[store.Record] = manifest.read(path)["members"]
    for member in members:
        status = manifest.status_of(path / member["folder"]) or {"state": "queued"}
        member |= {"state": status["state"], "seconds": elapsed(status), **_cause(status)}
    return members


def job_entry(path: Path, name: str, slurm: Elements) -> Entry:
    """Return the entry of a notebook's job: state, duration and cause, but no results."""
    status = slurm.present_status(store.read_status(path))
    return Entry(name, status["state"], seconds=elapsed(status), **_cause(status))


def run_entry(run: Run, name: str, slurm: Elements | None = None) -> Entry:
    """Return the entry of a run, with its results."""
    metrics = key_metrics(run)
    status = slurm.present_status(run.status) if slurm else run.status
    return Entry(
        name,
        status["state"],
        "run",
        elapsed(status),
        metrics.get("test_accuracy"),
        metrics.get("samples_per_second"),
        (run.metrics.get("equivalence") or {}).get("verdict", ""),
        **_cause(status),
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """Return a table with aligned columns; columns without any text are omitted."""
    columns = [
        (title, *cells)
        # Empty columns are omitted, except the first column, so that even an empty table has a
        # header.
        for title, *cells in zip(head, *rows, strict=True)
        if any(cells) or title == head[0]
    ]
    widths = [max(map(text_width, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(fit(cell, width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def displayed_path(path: Path) -> str:
    """Return a path as a user would type it in the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def elapsed(status: store.Record) -> float | None:
    """Return the duration in seconds, for a running process until now; None if it is unknown."""
    if not status.get("started"):
        return None
    if status.get("ended"):
        end = datetime.fromisoformat(status["ended"])
    elif status["state"] == "running":
        # Without a recorded end time, only a running process has a duration. The end time of a dead
        # process is unknown.
        end = datetime.now(UTC)
    else:
        return None
    return (end - datetime.fromisoformat(status["started"])).total_seconds()


def find(root: Path) -> tuple[set[Path], set[Path]]:
    """Return the folders of all notebook jobs and of all sweeps, at and below `root`.

    Raises:
        LabkitError: The folder is missing.
    """
    if not os.path.isdir(root):
        raise LabkitError(
            f"there is no folder {root}; give the folder of runs (usually runs/) or a run"
        )
    jobs, sweeps = set(), set()
    for folder, inside, files in os.walk(root):
        if "params.yaml" in files:
            jobs.add(Path(folder))
        if manifest.FILE in files:
            sweeps.add(Path(folder))
        if "experiment.json" in files:
            # The search skips the contents of a run's folder, which contains a model and logs, but
            # no job.
            inside.clear()
        inside[:] = [name for name in inside if not name.startswith(".")]
    return jobs, sweeps


def _cause(status: store.Record) -> store.Record:
    return {"cause": str(status.get("cause") or ""), "rank": status.get("rank")}
