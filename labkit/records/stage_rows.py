"""Models cut across ranks, row by row: what a rank keeps, does and sends; what the cut brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np

from labkit.records.run import Run, gate_failed
from labkit.records.staged_steps import (
    COMPUTES,
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

KINDS = ("weights", "gradients", "optimizer", "activations", "versions")
MISSING = float("nan")

Value: TypeAlias = str | float | list[int]


class Part(TypedDict):
    """What a run's metrics say of the memory of one rank: bytes by kind, and of the whole model."""

    rank: int
    stages: list[int]
    whole: float
    measured: dict[str, float | None]
    predicted: dict[str, float | None]


def rank_row(run: Run, part: Part) -> dict[str, Value]:
    """Time, traffic and memory of one rank; part: what `Run.metrics` has of it in `memory`."""
    return {"rank": int(part["rank"]), **_time(run, part), **_memory(part)}


def pipeline_row(run: Run, baseline: Run | None) -> dict[str, Value]:
    """Bubbles and speed-up of one run, as `labkit.figures.pipeline_table` says."""
    strategy = strategy_of(run)
    predicted, events = predicted_pipeline(run), stage_events(run)
    table = predicted.table
    seconds = stage_seconds(events, table.stages)
    # Without a lock between iterations there is no bubble to speak of.
    form = None if strategy.unlocked else table.bubble_share(*_of_a_rank(seconds, table.ranks))
    slices = strategy.slices
    bound = slices * 3 / (1 + 2 / table.ranks) if strategy.unlocked else None
    if form is not None:
        bound = slices * table.ranks * (1 - form)
    return {
        "schedule": table.name,
        "ranks": table.ranks,
        "stages": table.stages,
        "slices": slices,
        "microbatches": 1 if strategy.unlocked else table.microbatches,
        **_timed(run),
        "bubble_simulated": predicted.bubble_share,
        "bubble_formula": _number(form),
        "simulated_ms": 1e3 * predicted.seconds,
        **_speedup(run, baseline),
        "bound": _number(bound),
    }


def _time(run: Run, part: Part) -> dict[str, float]:
    history, rank = run.history, int(part["rank"])
    own = history[(history["rank"] == rank) & history["step"].isin(steady(history["step"]))]
    refused = gate_failed(run)
    return {
        "utilisation": MISSING if refused else _utilisation(run, rank, own),
        "step_ms": MISSING if refused else 1e3 * float(own["seconds"].median()),
        "payload_bytes": float(own["payload_bytes"].mean()),
        "messages": float(own["messages"].mean()),
    }


def _utilisation(run: Run, rank: int, history: pandas.DataFrame) -> float:
    """The share of its time in which a rank computes, by the rows of its timeline.

    Of other strategies, and of stages in slices, which also exchange within a row, what of a step
    is no communication.
    """
    if not staged(run) or strategy_of(run).slices > 1:
        return float(history["compute_seconds"].sum() / history["seconds"].sum())
    whole = next((each.timeline for each in (run, *run.seeds) if not each.timeline.empty), None)
    if whole is None:  # of one rank alone nothing is written down
        return float(history["compute_seconds"].sum() / history["seconds"].sum())
    # The same steps as of the history: the first ones are warm-up.
    own = whole[(whole["rank"] == rank) & whole["step"].isin(set(history["step"]))]
    kinds = own["kind"].astype(str).str.split(" ").str[0]
    lasts = own["stop"] - own["start"]
    computing = lasts[kinds.isin((*COMPUTES, "update"))].sum()
    return float(computing / lasts[kinds == "step"].sum())


def _memory(part: Part) -> dict[str, Value]:
    stages = [int(stage) for stage in part["stages"]]
    found: dict[str, Value] = {"stages": stages, "whole_bytes": part["whole"]}
    measured, predicted = part["measured"], part["predicted"]
    total = np.zeros(2)
    for kind in KINDS:
        own, expected = (_number(each.get(kind)) for each in (measured, predicted))
        total += own, expected
        found |= {f"{kind}_bytes": own, f"{kind}_predicted": expected}
        # A kind that a rank has none of has no relative error.
        found[f"{kind}_error"] = own / expected - 1 if expected else MISSING
    return found | {"bytes": float(total[0]), "bytes_predicted": float(total[1])}


def _number(value: float | None) -> float:
    return MISSING if value is None else float(value)


def _of_a_rank(seconds: dict[str, np.ndarray], ranks: int) -> Sequence[float]:
    """F, B, W of a micro-batch, in all chunks of a rank, the mean of the ranks."""
    forward = seconds["forward"].sum() / ranks
    weight = seconds["backward_weight"].sum() / ranks
    # A schedule has either the one or the other; that one is 0.
    both = (seconds["backward"] + seconds["backward_input"]).sum() / ranks
    return float(forward), float(both), float(weight)


def _timed(run: Run) -> dict[str, float]:
    steps = [] if gate_failed(run) else measured_steps(run)
    names = ("bubble_measured", "bubble_low", "bubble_high", "schedule_ms")
    if not steps:
        return dict.fromkeys(names, MISSING)
    # As for step times: median, and the steps between which four of five lie.
    shares = np.percentile([step.bubble_share for step in steps], (50, 10, 90))
    lasts = float(np.median([step.seconds for step in steps]))
    return dict(zip(names, (*map(float, shares), 1e3 * lasts), strict=True))


def _speedup(run: Run, baseline: Run | None) -> dict[str, float]:
    """The speed-up at as many rows a step; low and high are of the run's slow and fast steps."""
    names = ("speedup", "speedup_low", "speedup_high")
    if baseline is None or gate_failed(run):
        return dict.fromkeys(names, MISSING)
    # Batches may differ: the baseline is counted for as many rows as the run's.
    rows = run.experiment["batch_size"] / baseline.experiment["batch_size"]
    work = rows * baseline.metrics["step_ms"]["median"]
    step = run.metrics["step_ms"]
    return {name: work / step[q] for name, q in zip(names, ("median", "p90", "p10"), strict=True)}
