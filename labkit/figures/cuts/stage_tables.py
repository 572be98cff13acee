"""Models cut across ranks in numbers: what each rank keeps, does and sends; what the cut brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import LabkitError
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry
from labkit.records.run import Run
from labkit.records.staged_steps import (
    COMPUTES,
    measured_pipeline,
    measured_steps,
    predicted_pipeline,
    stage_events,
    stage_seconds,
    staged,
    strategy_of,
)
from labkit.records.timed_steps import steady

if TYPE_CHECKING:
    import pandas

__all__ = ["measured_pipeline", "pipeline_table", "predicted_pipeline", "rank_table"]

KINDS = ("weights", "gradients", "optimizer", "activations", "versions")
MISSING = float("nan")


def rank_table(runs: Iterable[Run] | Run) -> pandas.DataFrame:
    r"""A row a run and rank: time and traffic of a step, and memory by kind, all in one table.

    `stages` on the rank; `utilisation`: share of the steady steps' time in which it computes;
    `step_ms`, median; `payload_bytes` and `messages` that it hands over in a step, mean;
    `whole_bytes`: all weights of the model, which a rank holds before and after training. Of each
    kind, weights, gradients, optimizer, activations and versions (old weights that a backward pass
    still needs), `…_bytes` as measured, `…_predicted` from shapes and schedule, and `…_error` =
    measured / predicted - 1; `bytes` and `bytes_predicted` of all kinds together. Peaks of kinds
    need not come at the same moment. What a run did not measure is missing, and so are the times
    of a run whose equivalence gate failed.

    Raises: LabkitError, where there are no runs, or one has no results.
    """
    import pandas as pd

    rows = [
        {"run": entry.label, "rank": int(part["rank"]), **_time(entry, part), **_memory(part)}
        for entry in _completed(runs)
        for part in entry.metrics.get("memory", [])
    ]
    return pd.DataFrame(rows).set_index(["run", "rank"])


def pipeline_table(runs: Iterable[Run] | Run, baseline: Run | None = None) -> pandas.DataFrame:
    r"""A row a run of a model in stages: bubbles and speed-ups, measured beside theory.

    `bubble_measured`: share of all ranks' time, from the first row of a step to its last, in which
    they do not compute, the median of the steady steps (`_low`, `_high`: 10th and 90th
    percentile); `bubble_simulated` with the seconds of each stage and the run's network;
    `bubble_formula`, the method's own, of equal stages and free messages
    (`Table.bubble_share`). `schedule_ms` and `simulated_ms`: from a step's
    first row to its last. `speedup` over the baseline (`_low`, `_high` from p90 and p10 of the
    step), at most `bound`: p (1 - bubble_formula), which is m p/(m + p - 1) for GPipe; for
    delayed gradients \(3/(1 + 2/K)\), where a backward takes two forwards; of stages in `slices`
    as many times that. `ranks` are those of one slice.

    Args:
        runs: runs of other strategies are left out.
        baseline: one process on the same batches; default: the first of the runs with workers=1.

    Raises: LabkitError, where there are no runs of models in stages, or one has no results.
    """
    import pandas as pd

    shown = _completed(runs)
    base = baseline or next((e.run for e in shown if e.run.experiment["workers"] == 1), None)
    chosen = [entry for entry in shown if staged(entry.run) and entry.run.path != _path(base)]
    if not chosen:
        raise LabkitError("no runs of lk.Pipeline, lk.Layerwise or lk.DelayedGradients here")
    rows = [_row(entry, base) for entry in chosen]
    return pd.DataFrame(rows, index=pd.Index([entry.label for entry in chosen], name="run"))


def _completed(runs: Iterable[Run] | Run) -> list[Entry]:
    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    missing = [entry.label for entry in shown if not entry.metrics]
    if missing:
        raise LabkitError(f"no results of {', '.join(missing)}: give completed runs")
    return shown


def _path(run: Run | None) -> Any:
    return None if run is None else run.path


def _time(entry: Entry, part: dict[str, Any]) -> dict[str, float]:
    history, rank = entry.run.history, int(part["rank"])
    own = history[(history["rank"] == rank) & history["step"].isin(steady(history["step"]))]
    refused = entry.gate_failed
    return {
        "utilisation": MISSING if refused else _utilisation(entry.run, rank, own),
        "step_ms": MISSING if refused else 1e3 * float(own["seconds"].median()),
        "payload_bytes": float(own["payload_bytes"].mean()),
        "messages": float(own["messages"].mean()),
    }


def _utilisation(run: Run, rank: int, history: pandas.DataFrame) -> float:
    """By the rows of the timeline; of other strategies by what of a step is no communication.

    So it is of stages in slices, which also exchange within a row.
    """
    if not staged(run) or strategy_of(run).slices > 1:
        return float(history["compute_seconds"].sum() / history["seconds"].sum())
    whole = next((each.timeline for each in (run, *run.seeds) if not each.timeline.empty), None)
    if whole is None:  # of one rank alone nothing is written down
        return float(history["compute_seconds"].sum() / history["seconds"].sum())
    own = whole[(whole["rank"] == rank) & whole["step"].isin(set(history["step"]))]
    kinds = own["kind"].astype(str).str.split(" ").str[0]
    lasts = own["stop"] - own["start"]
    computing = lasts[kinds.isin((*COMPUTES, "update"))].sum()
    return float(computing / lasts[kinds == "step"].sum())


def _memory(part: dict[str, Any]) -> dict[str, Any]:
    stages = [int(stage) for stage in part["stages"]]
    found: dict[str, Any] = {"stages": stages, "whole_bytes": part["whole"]}
    measured, predicted = part["measured"], part["predicted"]
    for kind in KINDS:
        own, expected = (_number(each.get(kind)) for each in (measured, predicted))
        found |= {f"{kind}_bytes": own, f"{kind}_predicted": expected}
        found[f"{kind}_error"] = own / expected - 1 if expected else MISSING
    found["bytes"] = sum(found[f"{kind}_bytes"] for kind in KINDS)
    found["bytes_predicted"] = sum(found[f"{kind}_predicted"] for kind in KINDS)
    return found


def _number(value: float | None) -> float:
    return MISSING if value is None else float(value)


def _row(entry: Entry, baseline: Run | None) -> dict[str, Any]:
    run, strategy = entry.run, strategy_of(entry.run)
    predicted, events = predicted_pipeline(run), stage_events(run)
    table = predicted.table
    seconds = stage_seconds(events, table.stages)
    form = None if strategy.unlocked else table.bubble_share(*_of_a_rank(seconds, table.ranks))
    slices = strategy.slices
    bound = slices * 3 / (1 + 2 / table.ranks) if strategy.unlocked else None
    if form is not None:
        bound = slices * table.ranks * (1 - form)
    row: dict[str, Any] = {
        "schedule": table.name,
        "ranks": table.ranks,
        "stages": table.stages,
        "slices": slices,
        "microbatches": 1 if strategy.unlocked else table.microbatches,
        **_timed(run, refused=entry.gate_failed),
        "bubble_simulated": predicted.bubble_share,
        "bubble_formula": _number(form),
        "simulated_ms": 1e3 * predicted.seconds,
        **_speedup(entry, baseline),
        "bound": _number(bound),
    }
    return row


def _of_a_rank(seconds: dict[str, np.ndarray], ranks: int) -> Sequence[float]:
    """F, B, W of a micro-batch, in all chunks of a rank, the mean of the ranks."""
    forward = seconds["forward"].sum() / ranks
    weight = seconds["backward_weight"].sum() / ranks
    both = (seconds["backward"] + seconds["backward_input"]).sum() / ranks
    return float(forward), float(both), float(weight)


def _timed(run: Run, refused: bool) -> dict[str, float]:
    steps = [] if refused else measured_steps(run)
    names = ("bubble_measured", "bubble_low", "bubble_high", "schedule_ms")
    if not steps:
        return dict.fromkeys(names, MISSING)
    shares = np.percentile([each.bubble_share for each in steps], (50, 10, 90))
    lasts = float(np.median([each.seconds for each in steps]))
    return dict(zip(names, (*map(float, shares), 1e3 * lasts), strict=True))


def _speedup(entry: Entry, baseline: Run | None) -> dict[str, float]:
    """Of as many rows in a step; low and high with the run's own slow and fast steps."""
    names = ("speedup", "speedup_low", "speedup_high")
    if baseline is None or entry.gate_failed:
        return dict.fromkeys(names, MISSING)
    rows = entry.run.experiment["batch_size"] / baseline.experiment["batch_size"]
    work = rows * baseline.metrics["step_ms"]["median"]
    step = entry.metrics["step_ms"]
    return {name: work / step[q] for name, q in zip(names, ("median", "p90", "p10"), strict=True)}
