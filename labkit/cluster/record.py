"""What is kept of a run when its ranks have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.cluster.calls import Calls
from labkit.common.privacy import scrub
from labkit.exchange import timeline_rows
from labkit.experiment import Experiment
from labkit.records import store
from labkit.records.measure import summarise


def write(directory: Path, experiment: Experiment, calls: Calls, interrupted: bool) -> None:
    """Write logs, results and the final status; `interrupted` where nobody waited for the end."""
    write_logs(directory, calls)
    results = calls.results()
    if results is None:
        store.interrupt(directory, "interrupted before the ranks had a result")
        return
    first: dict[str, Any] = results[0]
    rows = [row | {"seed": experiment.seed} for part in results for row in part["rows"]]
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    store.write_json(directory / "environment.json", first["environment"])
    events = timeline_rows(part["timeline"] for part in results)
    store.write_table(directory / "timeline.parquet", events)
    looks = [row for part in results for row in part["microscope"]]
    store.write_table(directory / "microscope.parquet", looks)
    layers = [{"rank": k} | row for k, part in enumerate(results) for row in part["layers"]]
    store.write_table(directory / "layers.parquet", layers)
    first["memory_by_rank"] = [{"rank": rank} | part["parts"] for rank, part in enumerate(results)]
    first["memory"] = _most([part["memory"] for part in results])
    stopped = None
    if interrupted or first["stopped"]:
        stopped = f"stopped by the user after {rows[-1]['step'] + 1} steps"
    store.finish(directory, summarise(experiment, rows, first), rows, first["model"], stopped)


def write_logs(directory: Path, calls: Calls) -> None:
    """Write what each rank printed."""
    folder = directory / "logs"
    folder.mkdir(exist_ok=True)
    for rank, output in enumerate(calls.outputs()):
        store.write_atomically(folder / f"rank{rank}.log", scrub(output))


def _most(memories: list[dict[str, int]]) -> dict[str, int]:
    """The bytes of the rank that needs most, of each kind."""
    return {kind: max(memory[kind] for memory in memories) for kind in memories[0]}
