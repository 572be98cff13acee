"""Table rows for runs with pipeline stages: time, traffic, memory, idle time, and speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np

from labkit.records.run import Run, equivalence_failed
from labkit.records.staged_steps import (
    COMPUTES,
    is_staged,
    measured_steps,
    predicted_pipeline,
    stage_events,
    stage_seconds,
    strategy_of,
)
from labkit.records.timed_steps import steady_steps

if TYPE_CHECKING:
    import pandas

KINDS = ("weights", "gradients", "optimizer", "activations", "versions")
MISSING = float("nan")

Value: TypeAlias = str | float | list[int]


class RankMemory(TypedDict):
    """The memory of one rank: bytes of each kind, and bytes of the whole model's weights."""

    rank: int
    stages: list[int]
    whole: float
    measured: dict[str, float | None]
    predicted: dict[str, float | None]


def rank_row(run: Run, part: RankMemory) -> dict[str, Value]:
    """Return a rank's time, traffic and memory, given its entry `part` in the metric `memory`."""
    return {"rank": int(part["rank"]), **_time(run, part), **_memory(part)}


def pipeline_row(run: Run, baseline: Run | None) -> dict[str, Value]:
    """Return a run's row for `labkit.figures.pipeline_table`, with idle fraction and speed-up."""
    strategy = strategy_of(run)
    predicted, events = predicted_pipeline(run), stage_events(run)
    table = predicted.table
    seconds = stage_seconds(events, table.stages)
    # With delayed gradients, iterations overlap, so the bubble (idle fraction) of a single
    # iteration is undefined.
    formula = (
        None if strategy.unlocked else table.bubble_share(*_rank_seconds(seconds, table.ranks))
    )
    slices = strategy.tensor_parallel_size
    bound = slices * 3 / (1 + 2 / table.ranks) if strategy.unlocked else None
    if formula is not None:
        bound = slices * table.ranks * (1 - formula)
    return {
        "schedule": table.name,
        "ranks": table.ranks,
        "stages": table.stages,
        "slices": slices,
        "microbatches": 1 if strategy.unlocked else table.microbatches,
        **_schedule_times(run),
        "bubble_simulated": predicted.bubble_share,
        "bubble_formula": _number(formula),
        "simulated_ms": 1e3 * predicted.seconds,
        **_speedup(run, baseline),
        "bound": _number(bound),
    }


def _time(run: Run, part: RankMemory) -> dict[str, float]:
    history, rank = run.history, int(part["rank"])
    rank_history = history[
        (history["rank"] == rank) & history["step"].isin(steady_steps(history["step"]))
    ]
    failed = equivalence_failed(run)
    return {
        "utilisation": MISSING if failed else _utilisation(run, rank, rank_history),
        "step_ms": MISSING if failed else 1e3 * float(rank_history["seconds"].median()),
        "payload_bytes": float(rank_history["payload_bytes"].mean()),
        "messages": float(rank_history["messages"].mean()),
    }


def _utilisation(run: Run, rank: int, history: pandas.DataFrame) -> float:
    """Return the fraction of time for which a rank computes, from the events of its timeline.

    If a run has no stages, the fraction is computed from the history. The history is also used if
    stages use tensor parallelism, because their compute events then include communication.
    """
    if not is_staged(run) or strategy_of(run).tensor_parallel_size > 1:
        return float(history["compute_seconds"].sum() / history["seconds"].sum())
    timeline = next(
        (candidate.timeline for candidate in (run, *run.seeds) if not candidate.timeline.empty),
        None,
    )
    if timeline is None:  # A run with a single rank has no timeline.
        return float(history["compute_seconds"].sum() / history["seconds"].sum())
    # The timeline is limited to the steps in `history`, because `history` excludes warm-up steps.
    rank_events = timeline[(timeline["rank"] == rank) & timeline["step"].isin(set(history["step"]))]
    kinds = rank_events["kind"].astype(str).str.split(" ").str[0]
    durations = rank_events["stop"] - rank_events["start"]
    computing = durations[kinds.isin((*COMPUTES, "update"))].sum()
    return float(computing / durations[kinds == "step"].sum())


def _memory(part: RankMemory) -> dict[str, Value]:
    stages = [int(stage) for stage in part["stages"]]
    row: dict[str, Value] = {"stages": stages, "whole_bytes": part["whole"]}
    measured, predicted = part["measured"], part["predicted"]
    total = np.zeros(2)
    for kind in KINDS:
        measured_bytes, predicted_bytes = (
            _number(values.get(kind)) for values in (measured, predicted)
        )
        total += measured_bytes, predicted_bytes
        row |= {f"{kind}_bytes": measured_bytes, f"{kind}_predicted": predicted_bytes}
        # If a rank does not use a kind of memory, the relative error of the prediction is
        # undefined.
        row[f"{kind}_error"] = measured_bytes / predicted_bytes - 1 if predicted_bytes else MISSING
    return row | {"bytes": float(total[0]), "bytes_predicted": float(total[1])}


def _number(value: float | None) -> float:
    return MISSING if value is None else float(value)


def _rank_seconds(seconds: dict[str, np.ndarray], ranks: int) -> Sequence[float]:
    """Return the compute seconds (F, B, W) of an average rank for one micro-batch.

    F is the time of the forward pass, and B of the backward pass. W is the time of passes that
    compute only weight gradients. If a rank has several stages, their times are added.
    """
    forward = seconds["forward"].sum() / ranks
    weight = seconds["backward_weight"].sum() / ranks
    # A pipeline schedule contains either `backward` or `backward_input` actions, so the unused kind
    # of action takes 0 s.
    backward = (seconds["backward"] + seconds["backward_input"]).sum() / ranks
    return float(forward), float(backward), float(weight)


def _schedule_times(run: Run) -> dict[str, float]:
    steps = [] if equivalence_failed(run) else measured_steps(run)
    names = ("bubble_measured", "bubble_low", "bubble_high", "schedule_ms")
    if not steps:
        return dict.fromkeys(names, MISSING)
    # The bubble (idle fraction) is reported, like step times, as the median, p10 and p90 over
    # steps.
    shares = np.percentile([step.bubble_share for step in steps], (50, 10, 90))
    duration = float(np.median([step.seconds for step in steps]))
    return dict(zip(names, (*map(float, shares), 1e3 * duration), strict=True))


def _speedup(run: Run, baseline: Run | None) -> dict[str, float]:
    """Return the speed-up of a run over the baseline for the same number of samples.

    The fields `speedup_low` and `speedup_high` are computed from the run's 90th and 10th
    percentiles of step time.
    """
    names = ("speedup", "speedup_low", "speedup_high")
    if baseline is None or equivalence_failed(run):
        return dict.fromkeys(names, MISSING)
    # The run and the baseline may have different batch sizes. The baseline's time is therefore
    # scaled to the run's batch size.
    rows = run.experiment["batch_size"] / baseline.experiment["batch_size"]
    work = rows * baseline.metrics["step_ms"]["median"]
    step = run.metrics["step_ms"]
    return {name: work / step[q] for name, q in zip(names, ("median", "p90", "p10"), strict=True)}
