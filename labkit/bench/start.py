"""A benchmark of startup times of notebooks, second cells and sweep runs."""

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
from labkit.bench.runs import temporary_runs
from labkit.bench.timing import Row, head, spread
from labkit.cluster import Cluster, warm
from labkit.cluster.start import Start
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.terminal import say
from labkit.experiment import Experiment
from labkit.records.store import read_json
from labkit.strategies import AllReduce

WORKERS = 2  # The constant WORKERS is the number of workers in the notebook tour.ipynb.
IDLE = 600.0  # The constant IDLE is the time in seconds after which unused, prestarted ranks end.
# The constant MEMBERS is the number of runs in a sweep. The first run of a sweep is not counted,
# because it starts the ranks.
MEMBERS = 5


def measure(
    notebook: Path, repeats: int = 5, report: Callable[[str, list[float]], None] = lambda *_: None
) -> list[Row]:
    """Measure in turn, in several repeats, how long a user waits in four situations.

    Args:
        notebook: Notebook with the parameters `workers`, `epochs` and `seed`, such as
            notebooks/tour.ipynb.
        repeats: Number of repeats of each situation.
        report: Callback that receives the name and the seconds of each situation as soon as it is
            measured.

    Returns:
        One row per situation, with the waiting times in ms. "run" is the time of `labkit run`
        without warm engines. "run, warm" is the time of `labkit run` after `labkit prestart`.
        "second cell" is the time of a second call of `Cluster.run`. It excludes the training time.
        "member" is the time of one notebook run in a sweep. It excludes the time that the
        notebook's cells take.

    Raises:
        InvalidInput: The notebook does not exist.
        LabkitError: A command failed.
    """
    if not notebook.is_file():
        raise InvalidInput(
            f"notebook {notebook} does not exist; give the path of tour.ipynb with --notebook "
            "(labkit examples notebooks copies it)"
        )
    notebook = notebook.resolve()
    ways: Mapping[str, Callable[[Path], list[float]]] = {
        "run": _run,
        "run, warm": _run_warm,
        "second cell": _second_cell,
        "member": _members,
    }
    times: dict[str, list[float]] = {what: [] for what in ways}
    # Prestarted ranks end before the measurement, because they would shorten a cold start.
    warm.stop(WORKERS)
    for _ in range(repeats):
        for what, way in ways.items():
            seconds = way(notebook)
            report(what, seconds)
            times[what] += seconds
    return [
        head("start", notebook.stem, what, WORKERS, repeats=len(seconds)) | spread(seconds)
        for what, seconds in times.items()
    ]


def _run(notebook: Path) -> list[float]:
    with TemporaryDirectory(prefix="labkit-start-") as folder:
        return [_command(["run", str(notebook)], folder)]


def _run_warm(notebook: Path) -> list[float]:
    warm.start(Start.from_options(WORKERS, 1, launcher="local"), IDLE)
    try:
        return _run(notebook)
    finally:
        warm.stop(WORKERS)


def _second_cell(_: Path) -> list[float]:
    experiment = Experiment(model="mlp", dataset="digits", strategy=AllReduce(), workers=WORKERS)
    with temporary_runs(), Cluster(workers=WORKERS, name="start-bench") as cluster:
        cluster.run(experiment, show=False)
        begin = time.perf_counter()
        run = cluster.run(experiment.replace(seed=1), show=False)
        return [time.perf_counter() - begin - float(run.metrics["train_seconds"])]


def _members(notebook: Path) -> list[float]:
    """Return the seconds from each run of a sweep to the next, without the time in cells."""
    with TemporaryDirectory(prefix="labkit-start-") as folder:
        seeds = ",".join(str(seed) for seed in range(MEMBERS))
        _command(["sweep", str(notebook), f"seed={seeds}", "--jobs", "1"], folder)
        jobs = sorted(path.parent for path in Path(folder).glob("runs/*/*/output.ipynb"))
        starts = [_started(job) for job in jobs]
        spans = [later - earlier for earlier, later in pairwise(starts)]
        return [span - _in_cells(job) for span, job in zip(spans, jobs, strict=False)][1:]


def _command(words: list[str], folder: str) -> float:
    """Run a labkit command with the user's caches, and return how many seconds it takes."""
    begin = time.perf_counter()
    labkit = str(Path(sys.executable).with_name("labkit"))
    done = subprocess.run([labkit, *words], cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise LabkitError(
            f"labkit {' '.join(words)} ended with code {done.returncode}: {done.stderr}"
        )
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
    help="Notebook whose start is timed; it has the parameters workers, epochs and seed.",
)
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(1), help="Interleaved repeats."
)
@AS_JSON
def command(notebook: Path, repeats: int, file: Path | None) -> None:
    """Measure how long a notebook, a second cell and a run in a sweep take to start.

    If `labkit prestart` has started engines with two ranks, the benchmark first ends these engines.
    """

    def report(what: str, seconds: list[float]) -> None:
        say(f"{what}: {', '.join(f'{value:.3g}' for value in seconds)} s")

    rows = measure(notebook, repeats, report)
    show_rows(rows, {"case": "notebook", "what": "what", "repeats": "repeats"} | TIMES, file)
