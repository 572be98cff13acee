"""A comparison of the final losses of two runs, for each seed that both runs have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.records.pace import with_end_times
from labkit.records.run import Run
from labkit.records.verdict import completed_seeds

if TYPE_CHECKING:
    import pandas

LAST_STEPS = 20  # number of last steps over which the training loss is averaged, to reduce noise
LOSSES = ("training_loss", "test_loss")


def seed_by_seed(candidate: Run, baseline: Run) -> pandas.DataFrame:
    """Return both runs' final losses per common seed, and whether the candidate's are lower.

    The column `training_loss` contains means over all ranks and the last 20 training steps. The
    column `test_loss` contains the losses of the trained models on the test data.

    Raises:
        LabkitError: If there is no seed with which both runs completed.
    """
    candidate_losses, baseline_losses = _ends(candidate), _ends(baseline)
    # With the same seed, two runs start from the same weights and train on the same batches.
    table = candidate_losses.join(baseline_losses.add_prefix("baseline_"), how="inner")
    if table.empty:
        raise LabkitError(
            f"{candidate.name} and {baseline.name} have no completed seed in common; run both with "
            "the same seed and repeats"
        )
    for name in LOSSES:
        table[f"lower_{name}"] = table[name] < table[f"baseline_{name}"]
    return table[[f"{part}{name}" for name in LOSSES for part in ("", "baseline_", "lower_")]]


def _ends(run: Run) -> pandas.DataFrame:
    """Return a table of the final losses of a run, with one row per completed seed."""
    import pandas as pd

    rows = {}
    for seed_run in completed_seeds(run):
        history = with_end_times(seed_run.history)
        last_rows = history[history["step"] > history["step"].max() - LAST_STEPS]
        ends = (float(last_rows["loss"].mean()), float(seed_run.metrics["test_loss"]))
        rows[int(seed_run.experiment["seed"])] = ends
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(LOSSES))
    return table.rename_axis("seed")
