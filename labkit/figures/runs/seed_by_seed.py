"""Two runs with the same seeds, held against each other seed by seed."""

from __future__ import annotations

from math import comb

from labkit.figures.kit.findings import Markdown
from labkit.records.analysis.seeds import LAST, seed_by_seed
from labkit.records.compressors import method
from labkit.records.pace import in_order
from labkit.records.run import Run

__all__ = ["seed_by_seed", "seed_reading"]

_LOSSES = {
    "training_loss": f"training loss (mean of the last {LAST} steps)",
    "test_loss": "test loss",
}


def seed_reading(candidate: Run, baseline: Run) -> Markdown:
    r"""In how many seeds the first run ends with a lower loss, and how often chance would do that.

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
