"""Jobs and runs of a folder as lines of a table for the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit import store
from labkit.errors import LabkitError
from labkit.run import Run, gate_failed, key_metrics

HEAD = ("name", "state", "duration", "accuracy", "samples/s", "gate", "cause")
CAUSE_WIDTH = 80


def jobs_and_runs(root: Path) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows of HEAD for all jobs and runs at and below root, and a line for each unusable record."""
    found = store.scan(root)
    jobs = _jobs(root)
    skipped = list(found.skipped)
    rows = []
    for path in sorted([*jobs, *found.runs]):
        name = path.relative_to(root).as_posix() if path != root else path.name
        try:
            rows.append(job_row(path, name) if path in jobs else run_row(Run(path), name))
        except LabkitError as error:
            skipped.append(f"{name} left out: {error}")
    return rows, skipped


def job_row(path: Path, name: str) -> tuple[str, ...]:
    """A notebook's job: state and duration; results stand with its runs."""
    status = store.read_status(path)
    return name, status["state"], _duration(status), "", "", "", _cause(status)


def run_row(run: Run, name: str) -> tuple[str, ...]:
    """A run: state, duration, accuracy, samples/s, the gate's verdict, cause."""
    status, metrics = run.status, key_metrics(run)
    accuracy = metrics.get("test_accuracy")
    speed = metrics.get("samples_per_second")
    withheld = "withheld" if gate_failed(run) else ""  # no speed of a run that failed its gate
    return (
        name,
        status["state"],
        _duration(status),
        "" if accuracy is None else f"{accuracy:.2%}",
        withheld if speed is None else f"{speed:,.0f}",
        run.metrics.get("equivalence", {}).get("verdict", ""),
        _cause(status),
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """Aligned columns; those without any content are left out."""
    columns = [
        (title, *cells)
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


def seconds(value: float) -> str:
    """A duration in words: 4.2 s, 3 min 20 s, 2 h 5 min."""
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def elapsed(status: dict[str, Any]) -> float | None:
    """Seconds from start to end, or until now; None where either is not known."""
    if not status.get("started"):
        return None
    if status.get("ended"):
        end = datetime.fromisoformat(status["ended"])
    elif status["state"] == "running":
        end = datetime.now(UTC)
    else:
        return None
    return (end - datetime.fromisoformat(status["started"])).total_seconds()


def _jobs(root: Path) -> set[Path]:
    """Folders of notebook jobs; runs, which are many, are not looked into."""
    found = set()
    for folder, folders, files in os.walk(root):
        if "params.yaml" in files:
            found.add(Path(folder))
        if "experiment.json" in files:
            folders.clear()
    return found


def _duration(status: dict[str, Any]) -> str:
    spent = elapsed(status)
    return "" if spent is None else seconds(spent)


def _cause(status: dict[str, Any]) -> str:
    cause = str(status.get("cause") or "").split("\n")[0]
    rank = status.get("rank")
    text = f"rank {rank}: {cause}" if rank is not None else cause
    return text if len(text) <= CAUSE_WIDTH else f"{text[: CAUSE_WIDTH - 1]}…"
