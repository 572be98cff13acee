"""What is kept of a run when its ranks have ended."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.common.privacy import scrub
from labkit.exchange import timeline_rows
from labkit.experiment import Experiment
from labkit.records import store
from labkit.records.measure import summarise
from labkit.records.result import RankResult, Row, on_one_clock


def write(
    directory: Path,
    experiment: Experiment,
    ranks: Sequence[RankResult],
    why: str | None,
    pruned: bool = False,
) -> None:
    """Write results and the final status of a run.

    Args:
        directory: of the run.
        experiment: what was run.
        ranks: what they returned, in their order; nothing where they were stopped before.
        why: they were stopped, where the one that waited for them did it.
        pruned: they were stopped by a search, if they were stopped.
    """
    whole = ranks[0].whole if ranks else None
    if whole is None:
        who = why or "interrupted"
        store.interrupt(directory, f"{who}, before the ranks had a result")
        return
    staleness = _staleness(event for rank in ranks for event in rank.interleaving)
    rows = [
        {**row, **staleness.get((row["rank"], row["step"]), {}), "seed": experiment.seed}
        for rank in ranks
        for row in rank.rows
    ]
    # Ranks return their rows one rank after the other; a history goes by steps.
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    store.write_json(directory / "environment.json", whole.environment)
    tables = {
        "timeline": timeline_rows(on_one_clock(rank.timeline, rank.offsets) for rank in ranks),
        "microscope": [row for rank in ranks for row in rank.microscope],
        "layers": [{"rank": k} | row for k, rank in enumerate(ranks) for row in rank.layers],
    }
    for name, found in tables.items():
        store.write_table(directory / f"{name}.parquet", found)
    events = [event for rank in ranks for event in rank.interleaving]
    store.write_table(directory / "interleaving.parquet", events)
    stopped = None
    if why or ranks[0].stopped:
        pruned = pruned and not why
        who = why or ("pruned" if pruned else "stopped by the user")
        stopped = f"{who} after {_reached(rows)} steps"
    metrics = summarise(experiment, rows, ranks, whole)
    store.finish(directory, metrics, rows, whole.model, stopped, pruned)


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
    folder.mkdir(exist_ok=True)
    for rank, output in enumerate(outputs):
        path = folder / f"rank{rank}.log"
        before = path.read_text() if path.exists() else ""
        store.write_atomically(path, before + scrub(output))
