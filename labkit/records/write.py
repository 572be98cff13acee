"""What is kept of a run when its ranks have ended."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.common.privacy import scrub
from labkit.common.safe_files import make_folder, read_file, replace_file
from labkit.exchange import timeline_rows
from labkit.experiment import Experiment
from labkit.records import store
from labkit.records.measure import summarise
from labkit.records.result import Event, RankResult, Row, on_one_clock
from labkit.records.store import Rows


def write(
    directory: Path,
    experiment: Experiment,
    found: Mapping[int, RankResult],
    why: str | None,
    pruned: bool = False,
    told: Sequence[Row] = (),
    faults: Rows = (),
    dead: Sequence[int] = (),
) -> None:
    """Write results and the final status of a run.

    Args:
        directory: of the run.
        experiment: what was run.
        found: what ranks returned, in their order; nothing where they were stopped before.
        why: they were stopped, where the one that waited for them did it.
        pruned: they were stopped by a search, if they were stopped.
        told: rows of ranks that died.
        faults: times that it was begun anew, before what was run last.
        dead: ranks that died while that was run.
    """
    ranks = list(found.values())
    whole = next((rank.whole for rank in ranks if rank.whole is not None), None)
    if whole is None:
        who = why or "interrupted"
        store.interrupt(directory, f"{who}, before the ranks had a result")
        return
    staleness = _staleness(event for rank in ranks for event in rank.interleaving)
    rows = [
        {**row, **staleness.get((row["rank"], row["step"]), {}), "seed": experiment.seed}
        for own in (*(rank.rows for rank in ranks), told)
        for row in own
    ]
    # Ranks return their rows one rank after the other; a history goes by steps.
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    store.write_json(directory / "environment.json", whole.environment)
    tables = {
        "timeline": timeline_rows(_timelines(found)),
        "microscope": [row for rank in ranks for row in rank.microscope],
        "layers": [{"rank": k} | row for k, rank in found.items() for row in rank.layers],
    }
    for name, table in tables.items():
        store.write_table(directory / f"{name}.parquet", table)
    events = [event for rank in ranks for event in rank.interleaving]
    store.write_table(directory / "interleaving.parquet", events)
    stopped = None
    if why or ranks[0].stopped:
        pruned = pruned and not why
        who = why or ("pruned" if pruned else "stopped by the user")
        stopped = f"{who} after {_reached(rows)} steps"
    metrics = summarise(experiment, rows, found, whole)
    late = behind_the_end(dead, whole.faults, max(row["step"] for row in rows) + 1)
    metrics["faults"] = [*faults, *whole.faults, *late]
    store.finish(directory, metrics, rows, whole.model, stopped, pruned)


def behind_the_end(
    dead: Sequence[int], faults: Sequence[Mapping[str, Any]], step: float
) -> list[dict[str, Any]]:
    """The fault of ranks that died when all steps were taken, and that no rank has met.

    >>> behind_the_end([0, 2], [{"ranks": [2]}], 90)[0]["ranks"]
    [0]
    """
    known = [rank for fault in faults for rank in fault["ranks"]]
    late = [rank for rank in dead if rank not in known][: max(0, len(dead) - len(known))]
    fault = {"ranks": late, "step": int(step), "repeated": 0, "source": "the result", "seconds": {}}
    return [fault] if late else []


def _timelines(found: Mapping[int, RankResult]) -> Iterator[Sequence[Event]]:
    """Of each rank, on one clock; nothing of those that died."""
    for number in range(1 + max(found)):
        rank = found.get(number)
        yield [] if rank is None else on_one_clock(rank.timeline, rank.offsets)


def _reached(rows: Sequence[Row]) -> str:
    """How many steps the ranks have taken: one number, or from the fewest to the most."""
    counts = Counter(row["rank"] for row in rows).values()
    fewest, most = min(counts), max(counts)
    return f"{most}" if fewest == most else f"{fewest} to {most}"


def _staleness(events: Iterable[Row]) -> dict[tuple[float, float], Row]:
    """Of each gradient that was applied, by worker and step: the mean over servers."""
    found: dict[tuple[float, float], list[float]] = defaultdict(list)
    for event in events:
        if event["update"] >= 0:
            found[event["worker"], event["step"]].append(event["staleness"])
    return {key: {"staleness": statistics.mean(each)} for key, each in found.items()}


def write_logs(directory: Path, outputs: Sequence[str]) -> None:
    """Write what each rank printed, behind what it did before the run was taken up again."""
    folder = directory / "logs"
    make_folder(folder, directory)
    for rank, output in enumerate(outputs):
        path = folder / f"rank{rank}.log"
        before = read_file(path, root=directory).decode() if path.exists() else ""
        replace_file(path, (before + scrub(output)).encode(), directory)
