"""Scaling with the number of workers: each run is compared with a one-worker run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.records.run import Run, equivalence_failed, flatten
from labkit.strategies import RING, STRATEGIES, ExternalFramework, TFDistribute
from labkit.strategies.tf_distribute import TFKind

if TYPE_CHECKING:
    import pandas as pd


# A run and its one-worker baseline must agree in the fields in `_WORK`. The fields in `_WORK`
# define the work of a training step. Strategy and network have no effect on a one-worker baseline
# that sends nothing, so they may differ.
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
# On one line of a scaling figure, runs may differ only in `_ALONG`. The tuple `_ALONG` contains the
# fields for name, worker count, batch size and seeds.
_ALONG = ("name", "workers", "batch_size", "seed", "repeats")
_COLUMNS = ("run", "baseline", "kind", "line", "workers", "seeds")
_RATIOS = ("speedup", "speedup_low", "speedup_high", "slowest_seed", "fastest_seed")


def scalings(runs: Mapping[str, Run]) -> pd.DataFrame:
    r"""Compare each run with a run of one worker that has otherwise equal parameters.

    The table has one row per run and kind of scaling. Strong scaling keeps the global batch, and
    weak scaling the batch per worker. The returned table includes the columns `run`, `baseline`,
    `kind`, `workers`, `seeds` (number of the run's seeds), and `line`. Runs that differ only in
    workers and seeds have the same key in the column `line`. For strong scaling, the column speedup
    is \(T_1 / T_n\). For weak scaling, the column speedup is \(n T_1 / T_n\). With n workers, the
    median step time is \(T_n\). The columns `speedup_low` and `speedup_high` contain the speed-ups
    for the 90th and 10th percentiles of step times. The columns slowest_seed and fastest_seed are
    the speed-ups of the run's slowest and fastest seed. The columns efficiency, efficiency_low and
    efficiency_high contain percentages. Runs that failed verification have no row.
    """
    import pandas as pd

    # The times of a run that failed verification are invalid. A run that failed verification
    # therefore has no row and is no baseline.
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
    """Return the median speed-up and its range over seeds, by group of runs and worker count.

    The columns are line, kind, workers, seeds, runs, speedup, `speedup_low`, `speedup_high` and
    efficiency. The columns `speedup_low` and `speedup_high` contain the slowest and fastest seed's
    speed-ups. The column seeds contains the maximum number of seeds over worker counts.

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
    # A long step time gives a low speed-up. The lower bound of the speed-up therefore uses the 90th
    # percentile of step times.
    low, high = (
        work / step[percentile] if step.get(percentile) else speedup
        for percentile in ("p90", "p10")
    )
    # The values in `extremes` are minimum and maximum over the seeds' median step times. The values
    # `low` and `high` show the variation between single steps.
    extremes = (run.metrics.get("spread") or {}).get("step_ms.median") or [step["median"]]
    return (
        speedup,
        min(low, speedup),
        max(high, speedup),
        work / max(extremes),
        work / min(extremes),
    )


# The type `Alone` maps a key to names of one-worker runs. A key identifies runs with equal batch
# size, work, strategy and network. A run that sends nothing has "" as strategy and network in its
# key. A one-worker run that sends nothing is a baseline for every strategy and network.
Alone: TypeAlias = "dict[tuple[float | None, str, str], list[str]]"


def _baselines(usable: Mapping[str, Run]) -> Alone:
    """Group one-worker runs by their work, because only runs of the same work are comparable."""
    baselines: Alone = {}
    for name, run in usable.items():
        if _workers(run) == 1:
            batch, work = run.experiment.get("batch_size"), _work_key(run)
            # The worker of a one-worker run sends bytes only if the run has a parameter server.
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


# The column "labkit's" contains the labkit strategy that is equivalent to another framework's
# strategy.
EQUIVALENT_COLUMN = "labkit's"
# Compared runs may differ in the experiment fields in `NOT_WORK`, which do not change the work of
# training.
NOT_WORK = ("schema", "name", "strategy", "verify")


@dataclass(frozen=True)
class FrameworkComparison:
    """The result of a comparison of other frameworks' runs with labkit's runs.

    Attributes:
        table: One row per run, with strategy, architecture, synchronization, algorithm, costs per
            step, and accuracy.
        pairs: Pairs of rows for the same work: the first from another framework, the second from
            labkit.
        unmatched: Rows of other frameworks without an equivalent labkit run, each with the reason.
    """

    table: pd.DataFrame
    pairs: list[tuple[pd.Series, pd.Series]]
    unmatched: list[tuple[pd.Series, str]]


def compare_frameworks(runs: Mapping[str, Run]) -> FrameworkComparison:
    """Compare other frameworks' completed runs with labkit's completed runs."""
    import pandas as pd

    table = pd.DataFrame([_row(name, run) for name, run in runs.items()])
    comparison = FrameworkComparison(table, [], [])
    rows_and_runs = [
        (row, run) for (_, row), run in zip(table.iterrows(), runs.values(), strict=True)
    ]
    for theirs, run in rows_and_runs:
        if (kind := _kind(run.experiment["strategy"])) is None:
            continue
        matching = [
            pair for pair in rows_and_runs if _matches(pair[1].experiment["strategy"], kind.ours)
        ]
        differences = [_differences(run, other) for _, other in matching]
        same = [ours for (ours, _), names in zip(matching, differences, strict=True) if not names]
        comparison.pairs.extend((theirs, ours) for ours in same)
        if not same:
            fewest = min(differences, key=len, default=[])
            reason = (
                f"other work: {', '.join(fewest)}"
                if fewest
                else "no run with the same model, data and settings"
            )
            comparison.unmatched.append(
                (theirs, f"labkit's {theirs[EQUIVALENT_COLUMN]} has {reason}")
            )
    return comparison


def sent_bytes(run: Run) -> pd.DataFrame:
    """Return the bytes per step that the tasks of another framework send to each other.

    The table is empty for a run of labkit's own training.
    """
    import pandas as pd

    exchange: dict[str, dict[str, dict[str, int]]] = run.metrics.get("exchange") or {}
    # Records of older labkit versions lack the field `counted_steps`, and count bytes from the
    # start of the processes.
    steps = exchange.get("counted_steps", run.history["step"].nunique())
    rows = [
        {"source": source, "target": target, "bytes": nbytes / steps}
        for source, row in (exchange.get("sent_bytes", {}) if steps else {}).items()
        for target, nbytes in row.items()
    ]
    return pd.DataFrame(rows, columns=["source", "target", "bytes"])


def _differences(run: Run, other: Run) -> list[str]:
    """Return the names of fields that define the work of training and differ between two runs."""
    one, two = run.experiment, other.experiment
    names = dict.fromkeys([*one, *two])
    return [name for name in names if name not in NOT_WORK and one.get(name) != two.get(name)]


def _matches(fields: Mapping[str, JSON], options: Mapping[str, JSON]) -> bool:
    """Return whether a strategy has exactly the given options, and defaults in other fields."""
    if fields["name"] != options["name"]:
        return False
    default = STRATEGIES[str(options["name"])]().to_json()
    return default | dict(fields) == default | dict(options)


def _kind(fields: Mapping[str, JSON]) -> TFKind | None:
    """Return the kind of another framework's strategy, or None for a labkit strategy."""
    if fields["name"] == ExternalFramework.__name__:
        return RING
    if fields["name"] != TFDistribute.__name__:
        return None
    return TFDistribute.model_validate({k: v for k, v in fields.items() if k != "name"}).equivalent


def _row(name: str, run: Run) -> dict[str, JSON]:
    fields, metrics = run.experiment["strategy"], run.metrics
    equivalence = metrics["equivalence"]
    # The bytes that other frameworks' processes send are known only if the operating system's
    # kernel counts them.
    exchange = metrics.get("exchange") or {}
    counted = _kind(fields) is None or bool(exchange.get("sent_bytes"))
    return {
        "run": name,
        **dict(_taxonomy(fields, exchange, run.experiment["workers"])),
        "network": metrics.get("network") or "this machine's own",
        "equivalence": equivalence["verdict"],
        "why": equivalence["reason"],
        # Runs without verified equivalence may do different work, so their step times cannot be
        # compared.
        "step_ms": metrics["step_ms"]["median"] if equivalence["verdict"] == "passed" else None,
        "wire_bytes_per_step": metrics["wire_bytes_per_step"] if counted else None,
        "accuracy": metrics.get("test_accuracy", float("nan")),
    }


def _taxonomy(
    fields: Mapping[str, JSON], exchange: Mapping[str, JSON], workers: int
) -> Iterator[tuple[str, JSON]]:
    if (foreign_kind := _kind(fields)) is not None:
        yield "strategy", str(exchange.get("algorithm", "")).rpartition(".")[2]
        yield "architecture", foreign_kind.architecture
        yield "synchronization", foreign_kind.synchronization
        yield "algorithm", foreign_kind.algorithm
        options = ", ".join(
            f"{name}={v!r}" for name, v in foreign_kind.ours.items() if name != "name"
        )
        yield EQUIVALENT_COLUMN, f"{foreign_kind.ours['name']}({options})"
        yield "legacy", "Keras 3's fit does not support the strategy" if foreign_kind.legacy else ""
        return
    kind = STRATEGIES[str(fields["name"])]
    cell = kind.model_validate({k: v for k, v in fields.items() if k != "name"}).cell(workers)
    yield "strategy", kind.__name__
    yield "architecture", cell.architecture
    yield "synchronization", cell.synchronization
    yield "algorithm", exchange.get("algorithm") or fields.get("algorithm", "")
    yield EQUIVALENT_COLUMN, "itself"
    yield "legacy", ""
