"""What to expect of a job before it starts: duration from earlier ones, memory from its parts."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from labkit.common.capacity import OVERSUBSCRIBE, RANK_GIB, capacity, check_ranks
from labkit.common.errors import LabkitError
from labkit.common.units import duration_text, plural
from labkit.jobs import listing
from labkit.jobs.parameters import Values, declared, largest
from labkit.records import store
from labkit.records.scan import scan

# What makes a step longer or shorter; epochs and repeats multiply.
SAME = (
    *("model", "model_options", "dataset", "dataset_options", "workers", "threads", "strategy"),
    *("network", "batch_size", "steps", "precision"),
)


def of_notebook(notebook: Path, values: Values, root: Path) -> str:
    """One line: how long this notebook took before with these parameters, and what memory."""
    earlier = _durations(root / store.safe_name(notebook.stem), values)
    return f"{_in_words(earlier)}; {memory(workers_of(notebook, values))}"


def workers_of(notebook: Path, values: Values) -> int:
    """The most ranks that this notebook asks for with these parameters."""
    own = {name: parameter.default for name, parameter in declared(notebook).items()}
    asked = {**own, **values}
    # On the virtual clock one process plays all workers.
    return 1 if asked.get("clock") == "virtual" else largest(asked.get("workers"))


def of_experiment(record: store.Record, root: Path, ranks: int | None = None) -> str:
    """One line: duration from earlier runs of the same work on as many ranks, and memory.

    Args:
        record: the experiment's.
        root: of the runs.
        ranks: that it wants; None: as many as workers.
    """
    # Earlier runs are compared by the epoch, so that a short trial says something about a long run.
    epochs = int(record["epochs"]) * int(record["repeats"])
    earlier = [seconds * epochs for seconds in _seconds_per_epoch(root, record)]
    return f"{_in_words(earlier)}; {memory(ranks or int(record['workers']))}"


def refuse(workers: int, force: bool) -> None:
    """Refuse more ranks than this machine can start; ranks on other machines pass.

    Args:
        workers: ranks.
        force: oversubscribe; all processes of this command then do.

    Raises:
        InvalidInput: the ranks do not fit.
    """
    if force:
        os.environ[OVERSUBSCRIBE] = "1"
    if os.environ.get("LABKIT_LAUNCHER", "local") in ("", "local"):
        check_ranks(workers, force)


def memory(workers: int) -> str:
    """What the ranks need at least, beside what is free."""
    free, need = capacity().free, workers * RANK_GIB
    warning = "; that is too little" if need > free else ""
    return (
        f"memory: at least {need:.1f} GiB for {plural(workers, 'rank')}, plus data and model on "
        f"each; {free:.1f} GiB are free{warning}"
    )


def _in_words(earlier: list[float]) -> str:
    if not earlier:
        return "duration: no earlier run to estimate from"
    times = "once" if len(earlier) == 1 else f"{len(earlier)} times"
    # The median: one run on a busy machine, or one that compiled everything anew, shall not count.
    typical = duration_text(statistics.median(earlier))
    return f"duration: about {typical}, as measured {times} before"


def _durations(folder: Path, values: Values) -> list[float]:
    """Seconds of the completed jobs of a notebook that had the same parameters."""
    from labkit.records.safe_yaml import read_plain_file

    found = []
    for path in folder.glob("*/params.yaml"):
        try:
            status = store.read_status(path.parent)
            same = status["state"] == "completed" and read_plain_file(path) == dict(values)
        except LabkitError:  # `labkit ls` says what is wrong with it
            continue
        if same:
            found.append(listing.elapsed(status))
    return [seconds for seconds in found if seconds is not None]


def _seconds_per_epoch(root: Path, wanted: store.Record) -> list[float]:
    """Training seconds an epoch of completed runs that did the same work."""
    found = []
    for each in scan(root).found if root.is_dir() else []:
        same = all(each.experiment.get(key) == wanted.get(key) for key in SAME)
        metrics = each.metrics if same and each.status["state"] == "completed" else None
        if metrics and metrics.get("train_seconds") and metrics.get("epochs"):
            found.append(metrics["train_seconds"] / len(metrics["epochs"]))
    return found
