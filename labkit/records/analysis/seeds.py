"""Two runs with the same seeds: where each seed ends with a lower loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.records.pace import in_order
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

if TYPE_CHECKING:
    import pandas

LAST = 20  # steps over which a training loss is averaged: one batch alone is noise
LOSSES = ("training_loss", "test_loss")


def seed_by_seed(candidate: Run, baseline: Run) -> pandas.DataFrame:
    """Losses at the end of both runs, a row a seed that both completed; where the first is lower.

    `training_loss` is the mean over ranks and the last 20 steps, `test_loss` that of the trained
    model on the test data. Raises LabkitError where the runs share no completed seed.
    """
    mine, yours = _ends(candidate), _ends(baseline)
    # Only seeds of both: they start from the same weights and see the same batches.
    table = mine.join(yours.add_prefix("baseline_"), how="inner")
    if table.empty:
        raise LabkitError(
            f"{candidate.name} and {baseline.name} share no completed seed: run both with the "
            "same seed and repeats"
        )
    for name in LOSSES:
        table[f"lower_{name}"] = table[name] < table[f"baseline_{name}"]
    return table[[f"{part}{name}" for name in LOSSES for part in ("", "baseline_", "lower_")]]


def _ends(run: Run) -> pandas.DataFrame:
    """A row a seed: its losses at the end."""
    import pandas as pd

    rows = {}
    for each in seeds_of(run):
        history = in_order(each.history)
        late = history[history["step"] > history["step"].max() - LAST]
        ends = (float(late["loss"].mean()), float(each.metrics["test_loss"]))
        rows[int(each.experiment["seed"])] = ends
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(LOSSES))
    return table.rename_axis("seed")
