"""Comparison of runs with a baseline: loss by seed, precision, memory and loss scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import comb

import pandas as pd

from labkit.common.units import bytes_text
from labkit.figures.kit.entries import Markdown, completed_entries
from labkit.records.analysis.spending import (
    LAST_STEPS,
    PERSISTENT_MEMORY,
    loss_scales,
    precisions,
    seed_by_seed,
)
from labkit.records.compressors import method
from labkit.records.run import Run
from labkit.records.timed_steps import with_end_times

__all__ = [
    "loss_scales",
    "precision_table",
    "seed_by_seed",
    "summarize_loss_scale",
    "summarize_memory",
    "summarize_seed",
]

_LOSSES = {
    "training_loss": f"training loss (mean of the last {LAST_STEPS} steps)",
    "test_loss": "test loss",
}


def summarize_seed(candidate: Run, baseline: Run) -> Markdown:
    r"""State the number of seeds with a lower loss of the candidate, and its probability by chance.

    The one-sided sign test gives a probability p for n seeds. Chance alone causes k or more
    successes with the probability p. The formula is \(p = 2^{-n} \sum_{i \ge k} \binom{n}{i}\).

    Raises:
        LabkitError: No seed is completed in both runs.
    """
    table = seed_by_seed(candidate, baseline)
    steps = int(with_end_times(candidate.history)["step"].max()) + 1
    fields = candidate.experiment
    seeds = len(table)
    lines = [
        f"{method(candidate)} ends with a lower {what} than {method(baseline)} in "
        f"**{int(table[f'lower_{name}'].sum())} of {seeds} seeds**: mean "
        f"{table[name].mean():.4g} against {table[f'baseline_{name}'].mean():.4g}; if both were "
        "equally good, this many seeds or more would be lower by chance in "
        f"{_chance(int(table[f'lower_{name}'].sum()), seeds):.0%} of such comparisons."
        for name, what in _LOSSES.items()
    ]
    head = (
        f"On the data set {fields['dataset']}, after {steps} steps on {fields['workers']} workers:"
    )
    return Markdown("\n".join([head, "", *(f"- {line}" for line in lines)]))


def _chance(wins: int, trials: int) -> float:
    return float(sum(comb(trials, successes) for successes in range(wins, trials + 1)) / 2**trials)


_SAME = 0.005  # Memory sizes count as equal within this relative difference.


def precision_table(runs: Iterable[Run] | Run, baseline: Run) -> pd.DataFrame:
    """Return a row per run: precisions, accuracy, equivalence check, bytes, and times in ms.

    `weights_bytes`, `gradients_bytes`, `optimizer_bytes` and `peak_bytes` are the maxima over
    ranks. If a run failed its equivalence check, the table contains no time (ms) for it.

    Args:
        runs: Runs to compare; the baseline may be among them.
        baseline: Run with which the accuracy of all other runs is compared.

    Raises:
        LabkitError: There are no runs, or a run has no results.
    """
    return precisions({entry.label: entry.run for entry in completed_entries(runs)}, baseline)


def summarize_memory(runs: Iterable[Run] | Run, baseline: Run) -> Markdown:
    """Compare the memory of each run with that of the baseline, and list the runs' peak memory.

    Raises:
        LabkitError: There are no runs, or a run has no results.
    """
    shown = completed_entries(runs)
    base = baseline.metrics["memory_bytes"]
    lines = [
        f"**{entry.label}** {_memory(entry.metrics['memory_bytes'], base)}."
        for entry in shown
        if entry.run.path != baseline.path
    ]
    # Peaks of memory are listed in the order of the runs. A process keeps its memory, so a later
    # peak cannot be lower.
    in_order = sorted(shown, key=lambda entry: str(entry.run.status.get("started")))
    peaks = ", ".join(bytes_text(entry.metrics["memory_bytes"]["peak"]) for entry in in_order)
    lines.append(
        f"Peak memory of a rank's process, in the order of the runs: {peaks}. The same processes "
        "executed all runs, so a peak includes the memory of earlier runs and of TensorFlow "
        "itself. Each peak is an upper bound, so the peaks do not compare the memory of "
        "precisions."
    )
    return Markdown("\n".join(f"- {line}" for line in lines))


def summarize_loss_scale(rows: Iterable[Mapping[str, float]]) -> Markdown:
    """List the steps that ranks skipped; state whether loss scales were equal on all ranks.

    Args:
        rows: Records of loss scales and updates by step and rank, as the function `loss_scales`
            expects them.
    """
    table = loss_scales(rows)
    # `made` contains the number of updates in each step; 0 means that the step was skipped.
    made = table["updates"].diff().fillna(table["updates"])
    skipped = [
        f"step {step} by "
        + ("all ranks" if group.all() else f"rank {', '.join(map(str, group[group].index))} only")
        for step, group in (made == 0).iterrows()
        if group.any()
    ]
    alike = (table["loss_scale"].nunique(axis=1) == 1).all() and (made.nunique(axis=1) == 1).all()
    return Markdown(
        f"Skipped: {'; '.join(skipped) or 'no step'}. The ranks "
        + (
            "had the same loss scale after every step."
            if alike
            else "**had different loss scales**."
        )
    )


def _memory(group: dict[str, float], base: dict[str, float]) -> str:
    """Compare a run's memory with the baseline's, such as `keeps 1.6 MB of weights (2x)`."""
    more = [
        f"{bytes_text(group[kind])} of {kind} ({group[kind] / base[kind]:.3g}x)"
        for kind in PERSISTENT_MEMORY
        if base[kind]
        and abs(group[kind] - base[kind])
        > _SAME * sum(base[category] for category in PERSISTENT_MEMORY)
    ]
    return f"keeps {', '.join(more)}" if more else "keeps as many bytes in memory as the baseline"
