"""Two runs with the same seeds, held against each other seed by seed."""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.figures.kit.findings import Markdown
from labkit.records.compressors import method
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

if TYPE_CHECKING:
    import pandas

LAST = 20  # steps over which a training loss is averaged: one batch alone is noise
_LOSSES = {
    "training_loss": f"training loss (mean of the last {LAST} steps)",
    "test_loss": "test loss",
}


def seed_by_seed(candidate: Run, baseline: Run) -> pandas.DataFrame:
    """Losses at the end of both runs, a row a seed that both completed; where the first is lower.

    `training_loss` is the mean over ranks and the last 20 steps, `test_loss` that of the trained
    model on the test data. Raises LabkitError where the runs share no completed seed.
    """
    import pandas as pd

    mine, yours = _ends(candidate), _ends(baseline)
    both = [seed for seed in mine if seed in yours]
    if not both:
        raise LabkitError(
            f"{candidate.name} and {baseline.name} share no completed seed: run both with the "
            "same seed and repeats"
        )
    rows = [
        {
            part: value
            for name in _LOSSES
            for part, value in (
                (name, mine[seed][name]),
                (f"baseline_{name}", yours[seed][name]),
                (f"lower_{name}", mine[seed][name] < yours[seed][name]),
            )
        }
        for seed in both
    ]
    return pd.DataFrame(rows, index=pd.Index(both, name="seed"))


def seed_reading(candidate: Run, baseline: Run) -> Markdown:
    r"""In how many seeds the first run ends with a lower loss, and how often chance would do that.

    The sign test of one side: \(p = 2^{-n} \sum_{i \ge k} \binom{n}{i}\) for k of n seeds.

    Raises: LabkitError, where the runs share no completed seed.
    """
    table = seed_by_seed(candidate, baseline)
    steps = int(candidate.history["step"].max()) + 1
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


def _ends(run: Run) -> dict[int, dict[str, float]]:
    found = {}
    for each in seeds_of(run):
        history = each.history
        late = history[history["step"] > history["step"].max() - LAST]
        found[int(each.experiment["seed"])] = {
            "training_loss": float(late["loss"].mean()),
            "test_loss": float(each.metrics["test_loss"]),
        }
    return found


def _chance(wins: int, trials: int) -> float:
    return float(sum(comb(trials, each) for each in range(wins, trials + 1)) / 2**trials)
