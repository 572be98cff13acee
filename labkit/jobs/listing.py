"""Sweeps, jobs and runs of a folder as lines of a table for the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.common.units import duration_text
from labkit.jobs.elements import Elements
from labkit.jobs.listing_cache import LEAST, Listed, Row
from labkit.jobs.sweep import manifest
from labkit.records import store
from labkit.records.run import Run, gate_failed, key_metrics, known
from labkit.records.scan import Folder, folders, left_out, links_left_out, read_run

HEAD = ("name", "state", "duration", "accuracy", "samples/s", "gate", "cause")
CAUSE_WIDTH = 80


def jobs_and_runs(root: Path) -> tuple[list[Row], list[str]]:
    """Rows of HEAD for all sweeps, jobs and runs below root; a line for each unusable record."""
    skipped: list[str] = []
    rows: dict[str, Row] = {}
    found = list(folders(root))
    slurm = Elements()
    listed = Listed(root) if len(found) >= LEAST else None
    for folder in found:
        name = _name(folder.path, root)
        skipped += links_left_out(folder, root)
        try:
            if folder.is_run:
                # One by one: the records of thousands would fill memory, and slow all that is made.
                read = partial(_read, folder, name, slurm)
                row = read() if listed is None else listed.row(name, folder, read)
                if isinstance(row, str):
                    skipped.append(left_out(folder, root, row))
                else:
                    rows[folder.path] = row
            elif folder.odd and not folder.files.isdisjoint(("params.yaml", manifest.FILE)):
                skipped.append(left_out(folder, root, folder.odd))
                continue
            if "params.yaml" in folder.files:
                rows[folder.path] = job_row(Path(folder.path), name, slurm)
            if manifest.FILE in folder.files:
                rows |= sweep_rows(Path(folder.path), name, slurm)
        except LabkitError as error:
            skipped.append(f"{name} left out: {error}")
    if listed is not None:
        listed.keep()
    # By path, so that members stand below their sweep and runs below their job, in every order of
    # finds.
    return [rows[path] for path in sorted(rows, key=lambda path: path.split("/"))], skipped


def _read(folder: Folder, name: str, slurm: Elements) -> Row | str:
    """A run's row, or why it has none."""
    read = read_run(folder)
    return read if isinstance(read, str) else run_row(known(read), name, slurm)


def _name(path: str, root: Path) -> str:
    """A path as it is listed: below the root, without it."""
    # Not by pathlib, which takes as long as to read a record.
    return path[len(str(root)) + 1 :] if path != str(root) else root.name


def sweep_rows(path: Path, name: str, slurm: Elements) -> dict[str, Row]:
    """A sweep: its state, and how many members are in which; and those that are still to start."""
    status = manifest.read(path)
    states = manifest.states(path, status, slurm.as_it_is)
    total = sum(states.values())
    counts = [f"{states[state]} {state}" for state in store.STATES if states[state]]
    cause = f"{total} members: {', '.join(counts)}"
    rows: dict[str, Row] = {
        str(path): (name, status["state"], _duration(status), "", "", "", cause)
    }
    for member in status["members"]:
        job = path / member["folder"]
        if not os.path.exists(job):
            rows[str(job)] = (f"{name}/{job.name}", "queued", "", "", "", "", "")
    return rows


def job_row(path: Path, name: str, slurm: Elements) -> Row:
    """A notebook's job: state and duration; results stand with its runs."""
    status = slurm.as_it_is(store.read_status(path))
    return name, status["state"], _duration(status), "", "", "", _cause(status)


def run_row(run: Run, name: str, slurm: Elements | None = None) -> Row:
    """A run: state, duration, accuracy, samples/s, the gate's verdict, cause."""
    status, metrics = run.status, key_metrics(run)
    status = slurm.as_it_is(status) if slurm else status
    accuracy = metrics.get("test_accuracy")
    speed = metrics.get("samples_per_second")
    withheld = "withheld" if gate_failed(run) else ""  # no speed of a run that failed its gate
    return (
        name,
        status["state"],
        _duration(status),
        "" if accuracy is None else f"{accuracy:.2%}",
        withheld if speed is None else f"{speed:,.0f}",
        (run.metrics.get("equivalence") or {}).get("verdict", ""),
        _cause(status),
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """Aligned columns; those without any content are left out."""
    columns = [
        (title, *cells)
        # The name stays even where a table is empty: a head without a column says nothing.
        for title, *cells in zip(head, *rows, strict=True)
        if any(cells) or title == head[0]
    ]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def shown(path: Path) -> str:
    """A path as a person in this folder would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def elapsed(status: store.Record) -> float | None:
    """Seconds from start to end, or until now; None where either is not known."""
    if not status.get("started"):
        return None
    if status.get("ended"):
        end = datetime.fromisoformat(status["ended"])
    elif status["state"] == "running":
        # A process that died without a word has no end: its duration is not known, rather than too
        # long.
        end = datetime.now(UTC)
    else:
        return None
    return (end - datetime.fromisoformat(status["started"])).total_seconds()


def find(root: Path) -> tuple[set[Path], set[Path]]:
    """Folders of notebook jobs, and of sweeps; runs, which are many, are not looked into.

    Raises:
        LabkitError: there is no such folder.
    """
    if not os.path.isdir(root):
        raise LabkitError(f"no folder {root}: give the folder of runs (usually runs/) or a run")
    jobs, sweeps = set(), set()
    for folder, inside, files in os.walk(root):
        if "params.yaml" in files:
            jobs.add(Path(folder))
        if manifest.FILE in files:
            sweeps.add(Path(folder))
        if "experiment.json" in files:
            # A run's folder holds a model and logs, and no job.
            inside.clear()
        inside[:] = [name for name in inside if not name.startswith(".")]
    return jobs, sweeps


def _duration(status: store.Record) -> str:
    spent = elapsed(status)
    return "" if spent is None else duration_text(spent)


def _cause(status: store.Record) -> str:
    cause = str(status.get("cause") or "").split("\n")[0]
    rank = status.get("rank")
    text = f"rank {rank}: {cause}" if rank is not None else cause
    return text if len(text) <= CAUSE_WIDTH else f"{text[: CAUSE_WIDTH - 1]}…"
