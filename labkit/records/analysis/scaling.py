"""Scaling over workers: each run is compared with a run of one worker that does the same work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.records.run import Run, flatten, gate_failed

if TYPE_CHECKING:
    import pandas as pd

# Fields that define the work of a step, in which a run and its baseline must agree. A baseline of
# one worker that sends nothing may have another strategy and network, because it uses neither.
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
# Fields in which runs of one line of a figure may differ: the x axis, fields that depend on it, and
# random seeds.
_ALONG = ("name", "workers", "batch_size", "seed", "repeats")
_COLUMNS = ("run", "baseline", "kind", "line", "workers", "seeds")
_RATIOS = ("speedup", "speedup_low", "speedup_high", "slowest_seed", "fastest_seed")


def scalings(runs: Mapping[str, Run]) -> pd.DataFrame:
    r"""Compare each run with a run of one worker and otherwise equal parameters, if one exists.

    The table has one row per run and kind: strong (same global batch) or weak (same local batch).
    Columns: run, baseline; kind; line (a key shared by runs that differ only in workers and seeds);
    workers; seeds (number of the run's seeds); speedup, from median step times \(T\) with 1 and n
    workers: \(T_1 / T_n\) if strong, \(n T_1 / T_n\) if weak; `speedup_low` and `speedup_high`,
    from the p90 and p10 of the run's steps; slowest_seed and fastest_seed, the speed-ups of the
    run's slowest and fastest repeat; efficiency, efficiency_low and efficiency_high in percent.
    Runs that failed verification have no row.
    """
    import pandas as pd

    # Runs that failed verification have no valid speed, and cannot be baselines.
    usable = {n: run for n, run in runs.items() if _median(run) and not gate_failed(run)}
    rows, baselines = [], _baselines(usable)
    for name, run in usable.items():
        batch, workers = run.experiment.get("batch_size"), _workers(run)
        for kind, baseline_batch in (("strong", batch), ("weak", batch / workers)) if batch else ():
            baseline = _baseline(name, run, baselines, baseline_batch)
            # With one worker, strong and weak scaling are equal, and one row is enough.
            if baseline is not None and (workers > 1 or kind == "strong"):
                head = (name, baseline, kind, _line_key(run, kind), workers)
                # The default applies to a run without repeats, which has one seed.
                count = run.metrics.get("repeats", 1)
                rows.append((*head, count, *_ratios(run, usable[baseline], kind, workers)))
    # Rows of one-worker runs alone show no scaling. `row[4]` is the number of workers.
    rows_shown = rows if any(row[4] > 1 for row in rows) else []
    table = pd.DataFrame(rows_shown, columns=[*_COLUMNS, *_RATIOS])
    for end in ("", "_low", "_high"):
        table[f"efficiency{end}"] = 100 * table[f"speedup{end}"] / table["workers"]
    return table


def seed_bands(table: pd.DataFrame) -> pd.DataFrame:
    """Return the median speed-up and its range over seeds, for lines with several worker counts.

    Columns: line, kind, workers, seeds (maximum number over worker counts), runs (names of the
    line's runs), speedup, `speedup_low` (slowest seed), `speedup_high` (fastest seed), efficiency.

    Args:
        table: Table that `scalings` returned.
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
    # In strong scaling, n workers share the same batch. In weak scaling, n workers do n times the
    # work.
    work = (1 if kind == "strong" else workers) * _median(baseline)
    step = run.metrics["step_ms"]
    speedup = work / step["median"]
    # Slow steps give a low speed-up, so the lower bound comes from the 90th percentile.
    low, high = (
        work / step[percentile] if step.get(percentile) else speedup
        for percentile in ("p90", "p10")
    )
    # The extremes are medians of different seeds, while the percentiles above are over steps.
    extremes = (run.metrics.get("spread") or {}).get("step_ms.median") or [step["median"]]
    return (
        speedup,
        min(low, speedup),
        max(high, speedup),
        work / max(extremes),
        work / min(extremes),
    )


# Names of one-worker runs, by batch size, by work, and by strategy and network ("": any).
Alone: TypeAlias = "dict[tuple[float | None, str, str], list[str]]"


def _baselines(usable: Mapping[str, Run]) -> Alone:
    """Return a lookup table of possible baselines, which avoids comparing all pairs of runs."""
    baselines: Alone = {}
    for name, run in usable.items():
        if _workers(run) == 1:
            batch, work = run.experiment.get("batch_size"), _work_key(run)
            # A single worker sends bytes only if it has a parameter server.
            sends_bytes = bool(run.metrics.get("wire_bytes_per_step"))
            for environment in [_environment_key(run), *([] if sends_bytes else [""])]:
                baselines.setdefault((batch, work, environment), []).append(name)
    return baselines


def _baseline(name: str, run: Run, baselines: Alone, batch: float) -> str | None:
    """Return the name of a one-worker run with the same work and this global batch size, or None.

    A one-worker run of this batch size is its own baseline.
    """
    work = _work_key(run)
    if _workers(run) == 1 and run.experiment.get("batch_size") == batch:
        return name
    # A baseline with the same strategy and network is preferred.
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
