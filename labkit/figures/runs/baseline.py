"""Runs beside a baseline: seed by seed, and in precision, memory and loss scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import comb

import pandas as pd

from labkit.common.units import bytes_text
from labkit.figures.kit.entries import completed_entries
from labkit.figures.kit.findings import Markdown
from labkit.records.analysis.precisions import KEPT, loss_scales, precisions
from labkit.records.analysis.seeds import LAST, seed_by_seed
from labkit.records.compressors import method
from labkit.records.pace import in_order
from labkit.records.run import Run

__all__ = [
    "loss_scale_reading",
    "loss_scales",
    "memory_reading",
    "precision_table",
    "seed_by_seed",
    "seed_reading",
]

_LOSSES = {
    "training_loss": f"training loss (mean of the last {LAST} steps)",
    "test_loss": "test loss",
}


def seed_reading(candidate: Run, baseline: Run) -> Markdown:
    r"""Say in how many seeds the first run ends with a lower loss, and the odds by chance.

    The sign test of one side: \(p = 2^{-n} \sum_{i \ge k} \binom{n}{i}\) for k of n seeds.

    Raises: LabkitError, where the runs share no completed seed.
    """
    table = seed_by_seed(candidate, baseline)
    steps = int(in_order(candidate.history)["step"].max()) + 1
    fields = candidate.experiment
    seeds = len(table)
    lines = [
        f"{method(candidate)} ends with a lower {what} than {method(baseline)} in "
        f"**{int(table[f'lower_{name}'].sum())} of {seeds} seeds**: mean {table[name].mean():.4g} "
        f"against {table[f'baseline_{name}'].mean():.4g}; chance alone would give so many or "
        f"more in {_chance(int(table[f'lower_{name}'].sum()), seeds):.0%} of such trials."
        for name, what in _LOSSES.items()
    ]
    head = f"On {fields['dataset']}, after {steps} steps on {fields['workers']} workers:"
    return Markdown("\n".join([head, "", *(f"- {line}" for line in lines)]))


def _chance(wins: int, trials: int) -> float:
    return float(sum(comb(trials, each) for each in range(wins, trials + 1)) / 2**trials)


_SAME = 0.005  # relative: the few bytes of a loss scale are no more memory


def precision_table(runs: Iterable[Run] | Run, baseline: Run) -> pd.DataFrame:
    """Return a row a run: precision of compute and wire, accuracy, verdict, bytes and ms.

    `weights_bytes`, `gradients_bytes`, `optimizer_bytes` and `peak_bytes` are those of the rank
    that has most; a run whose equivalence gate failed has no milliseconds.

    Args:
        runs: the baseline among them or not.
        baseline: against which accuracy is judged.

    Raises: LabkitError, where there are no runs, or one has no results.
    """
    return precisions({entry.label: entry.run for entry in completed_entries(runs)}, baseline)


def memory_reading(runs: Iterable[Run] | Run, baseline: Run) -> Markdown:
    """Compare the memory of each run with the baseline, and say what peaks show.

    Raises: as `precision_table`.
    """
    shown = completed_entries(runs)
    base = baseline.metrics["memory_bytes"]
    lines = [
        f"**{entry.label}** {_memory(entry.metrics['memory_bytes'], base)}."
        for entry in shown
        if entry.run.path != baseline.path
    ]
    # In the order of the runs: a process keeps its memory, so that peaks only grow.
    in_order = sorted(shown, key=lambda entry: str(entry.run.status.get("started")))
    peaks = ", ".join(bytes_text(each.metrics["memory_bytes"]["peak"]) for each in in_order)
    lines.append(
        f"The most that a rank's process took, in the order of the runs: {peaks}. The same "
        "processes ran them all and keep what earlier runs have taken, TensorFlow itself "
        "included: an upper bound of each, and no measure of one precision against another."
    )
    return Markdown("\n".join(f"- {line}" for line in lines))


def loss_scale_reading(rows: Iterable[Mapping[str, float]]) -> Markdown:
    """Say which steps ranks skipped, and whether all had the same loss scale.

    Args:
        rows: as for `loss_scales`.
    """
    table = loss_scales(rows)
    made = table["updates"].diff().fillna(table["updates"])  # 0 where a step was skipped
    skipped = [
        f"step {step} by "
        + ("all ranks" if group.all() else f"rank {', '.join(map(str, group[group].index))} only")
        for step, group in (made == 0).iterrows()
        if group.any()
    ]
    alike = (table["loss_scale"].nunique(axis=1) == 1).all() and (made.nunique(axis=1) == 1).all()
    return Markdown(
        f"Skipped: {'; '.join(skipped) or 'no step'}. The ranks "
        + ("had the same loss scale after every step." if alike else "**did not stay alike**.")
    )


def _memory(group: dict[str, float], base: dict[str, float]) -> str:
    """Return `keeps 1.6 MB of weights (2x), …` or `keeps as many bytes as the baseline`."""
    more = [
        f"{bytes_text(group[kind])} of {kind} ({group[kind] / base[kind]:.3g}x)"
        for kind in KEPT
        if base[kind] and abs(group[kind] - base[kind]) > _SAME * sum(base[each] for each in KEPT)
    ]
    return f"keeps {', '.join(more)}" if more else "keeps as many bytes as the baseline"
