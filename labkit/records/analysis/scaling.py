"""What more workers bring: each run against one worker that does the same work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.records.run import Run, flatten, gate_failed

if TYPE_CHECKING:
    import pandas as pd

# What makes the work of a step: a baseline has to do the same. Of the strategy and the network one
# worker that says nothing uses nothing, so a baseline with the same ones is not demanded then.
_WORK = (
    "model",
    "dataset",
    "optimizer",
    "precision",
    "loss",
    "threads",
    "clock",
    "compute",
    "feed",
)
# In these the runs of one line may differ: its x axis, what follows from it, and chance.
_ALONG = ("name", "workers", "batch_size", "seed", "repeats")
_COLUMNS = ("run", "baseline", "kind", "line", "workers", "seeds")
_RATIOS = ("speedup", "speedup_low", "speedup_high", "slowest_seed", "fastest_seed")


def scalings(runs: Mapping[str, Run]) -> pd.DataFrame:
    r"""Each run against a run with workers=1 and otherwise equal parameters, where there is one.

    A row a run and kind, strong (the same global batch) or weak (the same local batch). Columns:
    run, baseline; kind; line, which runs that differ in workers and seeds only share; workers;
    seeds, how many the run has; speedup, \(T_1 / T_n\) strong, \(n T_1 / T_n\) weak, of median
    steps; `speedup_low` and `speedup_high`, with the 90th and 10th percentile of the run's steps;
    slowest_seed and fastest_seed, of the run's repeats; and efficiency, efficiency_low and
    efficiency_high, in per cent. Runs whose equivalence gate failed have no row.
    """
    import pandas as pd

    # No speed is told of a run that failed its gate, nor by means of one.
    usable = {n: run for n, run in runs.items() if _median(run) and not gate_failed(run)}
    rows, alone = [], _alone(usable)
    for name, run in usable.items():
        batch, workers = run.experiment.get("batch_size"), _workers(run)
        for kind, wanted in (("strong", batch), ("weak", batch / workers)) if batch else ():
            baseline = _baseline(name, run, alone, wanted)
            # On one worker strong and weak are the same; it is told once.
            if baseline is not None and (workers > 1 or kind == "strong"):
                head = (name, baseline, kind, _line(run, kind), workers)
                # A run without repeats is one seed.
                count = run.metrics.get("repeats", 1)
                rows.append((*head, count, *_ratios(run, usable[baseline], kind, workers)))
    # A lone baseline says nothing about scaling.
    # `row[4]` is the number of workers.
    shown = rows if any(row[4] > 1 for row in rows) else []
    table = pd.DataFrame(shown, columns=[*_COLUMNS, *_RATIOS])
    for end in ("", "_low", "_high"):
        table[f"efficiency{end}"] = 100 * table[f"speedup{end}"] / table["workers"]
    return table


def seed_bands(table: pd.DataFrame) -> pd.DataFrame:
    """The median seed and its spread, for each line measured on two or more numbers of workers.

    Columns: line, kind, workers, seeds (most of any number of workers), runs (names of the line's),
    speedup with `speedup_low` of the slowest seed and `speedup_high` of the fastest, efficiency.

    Args:
        table: from `scalings`.
    """
    import pandas as pd

    found = []
    for line, own in table.groupby("line", sort=False):
        by = own.groupby("workers", as_index=False).agg(
            count=("run", "size"),
            seeds=("seeds", "max"),
            speedup=("speedup", "median"),
            speedup_low=("slowest_seed", "min"),
            speedup_high=("fastest_seed", "max"),
        )
        if len(by) > 1:
            by["seeds"] = int(np.maximum(by["seeds"], by["count"]).max())
            by["runs"] = [tuple(dict.fromkeys(own["run"]))] * len(by)
            found.append(by.assign(line=line, kind=own["kind"].iloc[0]))
    bands = pd.concat(found) if found else pd.DataFrame(columns=["line", "workers", "speedup"])
    for name in [name for name in bands if name.startswith("speedup")]:
        bands[name.replace("speedup", "efficiency")] = 100 * bands[name] / bands["workers"]
    return bands


def _ratios(run: Run, baseline: Run, kind: str, workers: int) -> tuple[float, ...]:
    # Strong: the same batch in less time. Weak: n times the batch, so n times the work.
    work = (1 if kind == "strong" else workers) * _median(baseline)
    step = run.metrics["step_ms"]
    speedup = work / step["median"]
    # Slow steps make a low speed-up, so that the ends change places.
    low, high = (work / step[edge] if step.get(edge) else speedup for edge in ("p90", "p10"))
    # The spread of medians is that of seeds, apart from that of steps.
    ends = (run.metrics.get("spread") or {}).get("step_ms.median") or [step["median"]]
    return speedup, min(low, speedup), max(high, speedup), work / max(ends), work / min(ends)


# Runs of one worker by their batch and work, and by their strategy and network, too.
Alone: TypeAlias = "dict[tuple[float | None, str, str], list[str]]"


def _alone(usable: Mapping[str, Run]) -> Alone:
    """Who may be a baseline, looked up: of thousands of runs not each is held against each."""
    found: Alone = {}
    for name, run in usable.items():
        if _workers(run) == 1:
            batch, work = run.experiment.get("batch_size"), _work(run)
            heard = bool(run.metrics.get("wire_bytes_per_step"))  # by a server
            for like in [_like(run), *([] if heard else [""])]:
                found.setdefault((batch, work, like), []).append(name)
    return found


def _baseline(name: str, run: Run, alone: Alone, batch: float) -> str | None:
    """A run of one worker that does the same work on this global batch; itself where it is one."""
    work = _work(run)
    if _workers(run) == 1 and run.experiment.get("batch_size") == batch:
        return name
    # Same strategy and network first.
    candidates = alone.get((batch, work, _like(run))) or alone.get((batch, work, ""))
    return candidates[0] if candidates else None


def _like(run: Run) -> str:
    return json.dumps([run.experiment.get(name) for name in ("strategy", "network")])


def _work(run: Run) -> str:
    named = {key: value for key, value in run.experiment.items() if key.startswith(_WORK)}
    return json.dumps(flatten(named), sort_keys=True)


def _line(run: Run, kind: str) -> str:
    fields = {k: v for k, v in run.experiment.items() if k not in _ALONG}
    batch = run.experiment.get("batch_size", 0)
    each = batch if kind == "strong" else batch / _workers(run)
    return json.dumps([kind, each, flatten(fields)], sort_keys=True)


def _workers(run: Run) -> int:
    return int(run.experiment.get("workers", 1))


def _median(run: Run) -> float:
    return float((run.metrics.get("step_ms") or {}).get("median") or 0.0)
