"""How long somebody waits for an answer: of a whole notebook, a second cell, a sweep's member."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from labkit.bench.command import AS_JSON, TIMES, show_rows
from labkit.bench.temporary_runs import temporary_runs
from labkit.bench.timing import Row, head, spread
from labkit.cluster import Cluster, warm
from labkit.cluster.start import Start
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.terminal import say
from labkit.experiment import Experiment
from labkit.records.store import read_json
from labkit.strategies import AllReduce

WORKERS = 2  # as the tour has them
IDLE = 600.0  # seconds after which warm engines end, if this process does not end them
MEMBERS = 5  # of a sweep: the first one starts the engines, and does not count


def measure(
    notebook: Path, repeats: int = 5, hear: Callable[[str, list[float]], None] = lambda *_: None
) -> list[Row]:
    """Time what people wait for, in turns.

    Args:
        notebook: that is run; it has parameters `workers`, `epochs` and `seed`, as the tour.
        repeats: of each.
        hear: is told each kind and its seconds, as they come.

    Returns:
        One row a kind, ms: "run", of a command with nothing of it running; "run, warm", of the same
        where `labkit warm` has engines ready; "second cell", what `Cluster.run` takes on a cluster
        that has trained before, beyond training and tracing; "member", what a member of a sweep
        takes beyond its cells.

    Raises:
        InvalidInput: no such notebook.
        LabkitError: a command failed.
    """
    if not notebook.is_file():
        raise InvalidInput(f"notebook {notebook}: no such file; give that of the tour")
    notebook = notebook.resolve()
    ways: Mapping[str, Callable[[Path], list[float]]] = {
        "run": _run,
        "run, warm": _run_warm,
        "second cell": _second_cell,
        "member": _members,
    }
    found: dict[str, list[float]] = {what: [] for what in ways}
    warm.stop(WORKERS)  # of somebody else: what is timed cold must be cold
    for _ in range(repeats):
        for what, way in ways.items():
            seconds = way(notebook)
            hear(what, seconds)
            found[what] += seconds
    return [
        head("start", notebook.stem, what, WORKERS, repeats=len(seconds)) | spread(seconds)
        for what, seconds in found.items()
    ]


def _run(notebook: Path) -> list[float]:
    with TemporaryDirectory(prefix="labkit-start-") as folder:
        return [_command(["run", str(notebook)], folder)]


def _run_warm(notebook: Path) -> list[float]:
    warm.start(Start.asked(WORKERS, 1, launcher="local"), IDLE)
    try:
        return _run(notebook)
    finally:
        warm.stop(WORKERS)


def _second_cell(_: Path) -> list[float]:
    asked = Experiment(model="mlp", dataset="digits", strategy=AllReduce(), workers=WORKERS)
    with temporary_runs(), Cluster(workers=WORKERS, name="start-bench") as cluster:
        cluster.run(asked, show=False)
        begin = time.perf_counter()
        run = cluster.run(asked.replace(seed=1), show=False)
        return [time.perf_counter() - begin - float(run.metrics["train_seconds"])]


def _members(notebook: Path) -> list[float]:
    """From each member's start to that of the next one, less what its cells took."""
    with TemporaryDirectory(prefix="labkit-start-") as folder:
        seeds = ",".join(str(seed) for seed in range(MEMBERS))
        _command(["sweep", str(notebook), f"seed={seeds}", "--jobs", "1"], folder)
        jobs = sorted(path.parent for path in Path(folder).glob("runs/*/*/output.ipynb"))
        starts = [_started(job) for job in jobs]
        spans = [later - earlier for earlier, later in pairwise(starts)]
        return [span - _in_cells(job) for span, job in zip(spans, jobs, strict=False)][1:]


def _command(words: list[str], folder: str) -> float:
    """Seconds of a command, with what the user's own caches have."""
    begin = time.perf_counter()
    labkit = str(Path(sys.executable).with_name("labkit"))
    done = subprocess.run([labkit, *words], cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise LabkitError(f"labkit {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return seconds


def _started(job: Path) -> float:
    return datetime.fromisoformat(read_json(job / "status.json")["started"]).timestamp()


def _in_cells(job: Path) -> float:
    cells = json.loads((job / "output.ipynb").read_text())["cells"]
    return sum(cell["metadata"].get("papermill", {}).get("duration") or 0.0 for cell in cells)


@click.command("start")
@click.option(
    "--notebook",
    default="notebooks/tour.ipynb",
    show_default=True,
    type=click.Path(path_type=Path),
    help="With parameters workers, epochs and seed.",
)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@AS_JSON
def command(notebook: Path, repeats: int, file: Path | None) -> None:
    """Time first answers: a notebook, cold and with warm engines, a second cell, a sweep's member.

    Engines that `labkit warm` keeps for two ranks are ended first.
    """

    def hear(what: str, seconds: list[float]) -> None:
        say(f"{what}: {', '.join(f'{each:.3g}' for each in seconds)} s")

    rows = measure(notebook, repeats, hear)
    show_rows(rows, {"case": "notebook", "what": "what", "repeats": "repeats"} | TIMES, file)
