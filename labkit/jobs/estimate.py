"""Estimates before a job starts: duration from earlier runs, memory from the number of ranks."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.common.machine import OVERSUBSCRIBE, RANK_GIB, capacity, check_ranks
from labkit.common.units import duration_text, plural
from labkit.jobs import listing
from labkit.jobs.parameters import Values, declared, largest
from labkit.records import store
from labkit.records.folders import scan

# The experiment fields in `SAME` change the duration of a training step. `SAME` omits the fields
# `epochs` and `repeats`, which only multiply the duration.
SAME = (
    *("model", "model_options", "dataset", "dataset_options", "workers", "threads", "strategy"),
    *("network", "batch_size", "steps_per_epoch", "precision"),
)


def of_notebook(notebook: Path, values: Values, root: Path) -> str:
    """Return a text: the duration of earlier jobs with equal parameters, and the needed memory."""
    earlier = _durations(root / store.safe_name(notebook.stem), values)
    return f"{_duration_text(earlier)}; {memory(workers_of(notebook, values))}"


def workers_of(notebook: Path, values: Values) -> int:
    """Return the greatest number of ranks that a notebook starts with the given `values`."""
    defaults = {name: parameter.default for name, parameter in declared(notebook).items()}
    values_with_defaults = {**defaults, **values}
    # With a virtual clock, one process simulates all workers.
    return (
        1
        if values_with_defaults.get("clock") == "virtual"
        else largest(values_with_defaults.get("workers"))
    )


def of_experiment(record: store.Record, root: Path, ranks: int | None = None) -> str:
    """Return a text with the duration, estimated from runs of equal experiments, and the memory.

    Args:
        record: Record of the experiment to estimate.
        root: Folder of the runs.
        ranks: Number of ranks that the experiment starts; None: one rank per worker.
    """
    # The estimate compares durations per epoch, so that a short trial predicts a long run.
    epochs = int(record["epochs"]) * int(record["repeats"])
    earlier = [seconds * epochs for seconds in _seconds_per_epoch(root, record)]
    return f"{_duration_text(earlier)}; {memory(ranks or int(record['workers']))}"


def refuse(workers: int, force: bool) -> None:
    """Raise an error if this machine cannot run `workers` ranks; do nothing if a cluster runs them.

    Args:
        workers: Number of ranks.
        force: Whether to allow more ranks than cores, in this process and its child processes.

    Raises:
        InvalidInput: The machine has too few cores or too little memory for the ranks.
    """
    if force:
        os.environ[OVERSUBSCRIBE] = "1"
    if os.environ.get("LABKIT_LAUNCHER", "local") in ("", "local"):
        check_ranks(workers, force)


def memory(workers: int) -> str:
    """Return a text with the minimum memory for the ranks, and the free memory."""
    free, need = capacity().free, workers * RANK_GIB
    warning = ", which is too little" if need > free else ""
    return (
        f"memory: at least {need:.1f} GiB for {plural(workers, 'rank')}, plus data and model on "
        f"each rank; {free:.1f} GiB are free{warning}"
    )


def _duration_text(earlier: list[float]) -> str:
    if not earlier:
        return "duration: no earlier run to estimate from"
    times = "once" if len(earlier) == 1 else f"{len(earlier)} times"
    # The estimate is the median of earlier durations, because a few slow runs do not affect a
    # median. A run is slow, for example, if the machine is busy, or if the run compiles all
    # functions.
    typical = duration_text(statistics.median(earlier))
    return f"duration: about {typical}, as measured {times} before"


def _durations(folder: Path, values: Values) -> list[float]:
    """Return the duration in seconds of each completed job with equal parameter values."""
    from labkit.records.safe_yaml import read_plain_file

    durations = []
    for path in folder.glob("*/params.yaml"):
        try:
            status = store.read_status(path.parent)
            same = status["state"] == "completed" and read_plain_file(path) == dict(values)
        except LabkitError:  # the command `labkit ls` reports the damaged record
            continue
        if same:
            durations.append(listing.elapsed(status))
    return [seconds for seconds in durations if seconds is not None]


def _seconds_per_epoch(root: Path, experiment_record: store.Record) -> list[float]:
    """Return the seconds per epoch of each completed run with equal values of the fields `SAME`."""
    durations = []
    for run in scan(root).usable if root.is_dir() else []:
        same = all(run.experiment.get(key) == experiment_record.get(key) for key in SAME)
        metrics = run.metrics if same and run.status["state"] == "completed" else None
        if metrics and metrics.get("train_seconds") and metrics.get("epochs"):
            durations.append(metrics["train_seconds"] / len(metrics["epochs"]))
    return durations
