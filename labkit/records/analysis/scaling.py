"""Scaling with the number of workers: each run is compared with a one-worker run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.records.run import Run, equivalence_failed, flatten

if TYPE_CHECKING:
    import pandas as pd

# The fields in `_WORK` define the work of a training step, so a run and its baseline must agree in
# them. If the only worker of the baseline sends nothing, strategy and network have no effect, so
# they may differ.
_WORK = (
    "model",
    "dataset",
    "optimizer",
    "precision",
    "loss",
    "threads",
    "clock",
    "virtual",
    "input_mode",
)
# Fields in which the runs on one line of a figure may differ: the x axis, fields that depend on it,
# and random seeds.
_ALONG = ("name", "workers", "batch_size", "seed", "repeats")
_COLUMNS = ("run", "baseline", "kind", "line", "workers", "seeds")
_RATIOS = ("speedup", "speedup_low", "speedup_high", "slowest_seed", "fastest_seed")


def scalings(runs: Mapping[str, Run]) -> pd.DataFrame:
    r"""Compare each run with a run of one worker that has otherwise equal parameters.

    The table has one row per run and kind of scaling: strong (same global batch) or weak (same
    batch per worker).
    The returned table includes the columns `run`, `baseline`, `kind`, `workers`, `seeds` (number of
    the run's seeds), and `line`. Runs that differ only in workers and seeds have the same value (a
    key) in the column `line`. The column speedup is \(T_1 / T_n\) for strong and \(n T_1 / T_n\)
    for weak scaling, where \(T_n\) is the median step time with n workers. The columns
    `speedup_low` and `speedup_high` use the p90 and p10 of the run's step times. The columns
    slowest_seed and fastest_seed are the speed-ups of the run's slowest and fastest seed. The
    columns efficiency, efficiency_low and efficiency_high contain percentages. Runs that failed
    verification have no row.
    """
    import pandas as pd

    # The times of a run that failed verification are invalid, so this run has no row and is no
    # baseline.
    usable = {n: run for n, run in runs.items() if _median(run) and not equivalence_failed(run)}
    rows, baselines = [], _baselines(usable)
    for name, run in usable.items():
        batch, workers = run.experiment.get("batch_size"), _workers(run)
        for kind, baseline_batch in (("strong", batch), ("weak", batch / workers)) if batch else ():
            baseline = _baseline(name, run, baselines, baseline_batch)
            # With one worker, strong and weak scaling are the same, so one row is enough.
            if baseline is not None and (workers > 1 or kind == "strong"):
                head = (name, baseline, kind, _line_key(run, kind), workers)
                # A run without repeats has one seed and no metric `repeats`.
                count = run.metrics.get("repeats", 1)
                rows.append((*head, count, *_ratios(run, usable[baseline], kind, workers)))
    # If all rows belong to one-worker runs, the table is empty, because it would show no scaling.
    # The element `row[4]` is the number of workers.
    rows_shown = rows if any(row[4] > 1 for row in rows) else []
    table = pd.DataFrame(rows_shown, columns=[*_COLUMNS, *_RATIOS])
    for end in ("", "_low", "_high"):
        table[f"efficiency{end}"] = 100 * table[f"speedup{end}"] / table["workers"]
    return table


def seed_bands(table: pd.DataFrame) -> pd.DataFrame:
    """Return median speed-ups with ranges over seeds, for lines with several worker counts.

    The columns are line, kind, workers, seeds (largest number for any worker count), runs (names),
    speedup, `speedup_low` (slowest seed), `speedup_high` (fastest seed), and efficiency.

    Args:
        table: Table that `scalings` has returned.
    """
    import pandas as pd

    parts = []
    for line, line_rows in table.groupby("line", sort=False):
        by_workers = line_rows.groupby("workers", as_index=False).agg(
            count=("run", "size"),
            seeds=("seeds", "max"),
            speedup=("speedup", "median"),
            speedup_low=("slowest_seed", "min"),
            speedup_high=("fastest_seed", "max"),
        )
        if len(by_workers) > 1:
            by_workers["seeds"] = int(np.maximum(by_workers["seeds"], by_workers["count"]).max())
            by_workers["runs"] = [tuple(dict.fromkeys(line_rows["run"]))] * len(by_workers)
            parts.append(by_workers.assign(line=line, kind=line_rows["kind"].iloc[0]))
    bands = pd.concat(parts) if parts else pd.DataFrame(columns=["line", "workers", "speedup"])
    for name in [name for name in bands if name.startswith("speedup")]:
        bands[name.replace("speedup", "efficiency")] = 100 * bands[name] / bands["workers"]
    return bands


def _ratios(run: Run, baseline: Run, kind: str, workers: int) -> tuple[float, ...]:
    # In strong scaling, n workers together do as much work per step as one worker. In weak scaling,
    # n workers together do n times as much work per step as one worker.
    work = (1 if kind == "strong" else workers) * _median(baseline)
    step = run.metrics["step_ms"]
    speedup = work / step["median"]
    # A long step time gives a low speed-up, so the lower bound is computed from the 90th percentile
    # of step times.
    low, high = (
        work / step[percentile] if step.get(percentile) else speedup
        for percentile in ("p90", "p10")
    )
    # The values in `extremes` are minimum and maximum over the seeds' median step times, whereas
    # `low` and `high` use percentiles of single steps.
    extremes = (run.metrics.get("spread") or {}).get("step_ms.median") or [step["median"]]
    return (
        speedup,
        min(low, speedup),
        max(high, speedup),
        work / max(extremes),
        work / min(extremes),
    )


# Names of one-worker runs, by batch size, work, and strategy with network. The text for strategy
# and network is "" if the run sends nothing, because any strategy and network then match.
Alone: TypeAlias = "dict[tuple[float | None, str, str], list[str]]"


def _baselines(usable: Mapping[str, Run]) -> Alone:
    """Return the one-worker runs grouped by work, so that not all pairs of runs are compared."""
    baselines: Alone = {}
    for name, run in usable.items():
        if _workers(run) == 1:
            batch, work = run.experiment.get("batch_size"), _work_key(run)
            # If a run has only one worker, this worker sends bytes only to a parameter server.
            sends_bytes = bool(run.metrics.get("wire_bytes_per_step"))
            for environment in [_environment_key(run), *([] if sends_bytes else [""])]:
                baselines.setdefault((batch, work, environment), []).append(name)
    return baselines


def _baseline(name: str, run: Run, baselines: Alone, batch: float) -> str | None:
    """Return the name of a one-worker run with the same work and global batch size, or None.

    If the run itself has one worker and the batch size `batch`, the run is its own baseline.
    """
    work = _work_key(run)
    if _workers(run) == 1 and run.experiment.get("batch_size") == batch:
        return name
    # A baseline with the same strategy and network is preferred over other baselines.
    candidates = baselines.get((batch, work, _environment_key(run))) or baselines.get(
        (batch, work, "")
    )
    return candidates[0] if candidates else None


def _environment_key(run: Run) -> str:
    return json.dumps([run.experiment.get(name) for name in ("strategy", "network")])


def _work_key(run: Run) -> str:
    named = {key: value for key, value in run.experiment.items() if key.startswith(_WORK)}
    return json.dumps(flatten(named), sort_keys=True)


def _line_key(run: Run, kind: str) -> str:
    fields = {k: v for k, v in run.experiment.items() if k not in _ALONG}
    batch = run.experiment.get("batch_size", 0)
    batch_per_unit = batch if kind == "strong" else batch / _workers(run)
    return json.dumps([kind, batch_per_unit, flatten(fields)], sort_keys=True)


def _workers(run: Run) -> int:
    return int(run.experiment.get("workers", 1))


def _median(run: Run) -> float:
    return float((run.metrics.get("step_ms") or {}).get("median") or 0.0)
