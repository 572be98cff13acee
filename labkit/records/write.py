"""The writer of a run's records after its ranks have ended."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.common import keras_settings
from labkit.common.canonical_json import JSON
from labkit.common.files import make_folder, read_file, replace_file
from labkit.common.machine import machine
from labkit.common.privacy import scrub
from labkit.communicator.mpi_library import implementation
from labkit.exchange import timeline_rows
from labkit.experiment import Experiment
from labkit.records import provenance, store
from labkit.records.run_metrics import Event, RankResult, Row, on_one_clock, summarise
from labkit.records.store import Rows


def write(
    directory: Path,
    experiment: Experiment,
    results: Mapping[int, RankResult],
    reason: str | None,
    pruned: bool = False,
    dead_rows: Sequence[Row] = (),
    faults: Rows = (),
    dead: Sequence[int] = (),
) -> None:
    """Write the results and the final status of a run.

    Args:
        directory: Directory of the run.
        experiment: Experiment that was run.
        results: One result per rank number; empty if the ranks were stopped before they had
            results.
        reason: Why the submitting process stopped the ranks; None if it did not stop them.
        pruned: Whether a search stopped the ranks, because other trials were better.
        dead_rows: History rows of the ranks that died.
        faults: Records of the restarts before the last attempt.
        dead: Numbers of the ranks that died in the last attempt.
    """
    provenance.write(directory)
    ranks = list(results.values())
    run_result = next((rank.whole for rank in ranks if rank.whole is not None), None)
    if run_result is None:
        cause = reason or "interrupted"
        store.interrupt(directory, f"{cause}, before the ranks had results")
        return
    staleness = _staleness(event for rank in ranks for event in rank.update_log)
    rows = [
        {**row, **staleness.get((row["rank"], row["step"]), {}), "seed": experiment.seed}
        for rank_rows in (*(rank.rows for rank in ranks), dead_rows)
        for row in rank_rows
    ]
    # The rows are grouped by rank, but the history must be ordered by step.
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    store.write_json(directory / "environment.json", run_result.environment)
    tables = {
        "timeline": timeline_rows(_timelines(results)),
        "compression_stats": [row for rank in ranks for row in rank.compression_stats],
        "layers": [{"rank": k} | row for k, rank in results.items() for row in rank.layers],
        "resources": [{"rank": k, **row} for k, rank in results.items() for row in rank.resources],
    }
    for name, table in tables.items():
        store.write_table(directory / f"{name}.parquet", table)
    events = [event for rank in ranks for event in rank.update_log]
    store.write_table(directory / "update_log.parquet", events)
    stopped = None
    if reason or ranks[0].stopped:
        pruned = pruned and not reason
        cause = reason or ("pruned" if pruned else "stopped by the user")
        stopped = f"{cause} after {_step_count(rows)} steps"
    metrics = summarise(experiment, rows, results, run_result)
    unreported = unreported_deaths(dead, run_result.faults, max(row["step"] for row in rows) + 1)
    metrics["faults"] = [*faults, *run_result.faults, *unreported]
    store.finish(directory, metrics, rows, run_result.model, stopped, pruned)


def unreported_deaths(
    dead: Sequence[int], faults: Sequence[Mapping[str, Any]], step: float
) -> list[dict[str, Any]]:
    """Return fault records of ranks whose death after the last step no other rank noticed.

    >>> unreported_deaths([0, 2], [{"ranks": [2]}], 90)[0]["ranks"]
    [0]
    """
    reported = [rank for fault in faults for rank in fault["ranks"]]
    unreported = [rank for rank in dead if rank not in reported][
        : max(0, len(dead) - len(reported))
    ]
    fault = {
        "ranks": unreported,
        "step": int(step),
        "repeated": 0,
        "source": "the result",
        "seconds": {},
    }
    return [fault] if unreported else []


def _timelines(results: Mapping[int, RankResult]) -> Iterator[Sequence[Event]]:
    """Yield each rank's timeline with times on rank 0's clock, or [] for a rank that died."""
    for number in range(1 + max(results)):
        rank = results.get(number)
        yield [] if rank is None else on_one_clock(rank.timeline, rank.offsets)


def _step_count(rows: Sequence[Row]) -> str:
    """Return the number of completed steps as text, or a range if it differs between ranks."""
    counts = Counter(row["rank"] for row in rows).values()
    fewest, most = min(counts), max(counts)
    return f"{most}" if fewest == most else f"{fewest} to {most}"


def _staleness(events: Iterable[Row]) -> dict[tuple[float, float], Row]:
    """Return each applied gradient's staleness, averaged over servers; keys: (worker, step)."""
    samples: dict[tuple[float, float], list[float]] = defaultdict(list)
    for event in events:
        if event["update"] >= 0:
            samples[event["worker"], event["step"]].append(event["staleness"])
    return {key: {"staleness": statistics.mean(values)} for key, values in samples.items()}


def write_logs(directory: Path, outputs: Sequence[str]) -> None:
    """Append each rank's output to its log file, which already exists if the run was resumed."""
    folder = directory / "logs"
    make_folder(folder, directory)
    for rank, output in enumerate(outputs):
        path = folder / f"rank{rank}.log"
        before = read_file(path, root=directory).decode() if path.exists() else ""
        replace_file(path, (before + scrub(output)).encode(), directory)


def describe() -> dict[str, JSON]:
    """Import TensorFlow and MPI, and return the versions and hardware that this rank sees."""
    import keras
    import mpi4py
    import tensorflow as tf
    from mpi4py import MPI

    return machine() | {
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": implementation(MPI.Get_library_version()),
        **({"keras_settings": changes} if (changes := keras_settings.changed()) else {}),
        "threads": os.environ.get("TF_NUM_INTRAOP_THREADS", "unset"),
    }
