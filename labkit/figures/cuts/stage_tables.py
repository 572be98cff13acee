"""Models cut across ranks in numbers: what each rank keeps, does and sends; what the cut brings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.figures.kit.entries import completed
from labkit.records.run import Run
from labkit.records.stage_rows import pipeline_row, rank_row
from labkit.records.staged_steps import measured_pipeline, predicted_pipeline, staged

if TYPE_CHECKING:
    import pandas

__all__ = ["measured_pipeline", "pipeline_table", "predicted_pipeline", "rank_table"]


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
        {"run": entry.label, **rank_row(entry.run, part)}
        for entry in completed(runs)
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

    shown = completed(runs)
    # The first with one worker, as a person would take it.
    base = baseline or next((e.run for e in shown if e.run.experiment["workers"] == 1), None)
    chosen = [
        entry
        for entry in shown
        if staged(entry.run) and (base is None or entry.run.path != base.path)
    ]
    if not chosen:
        raise LabkitError("no runs of lk.Pipeline, lk.Layerwise or lk.DelayedGradients here")
    rows = [pipeline_row(entry.run, base) for entry in chosen]
    return pd.DataFrame(rows, index=pd.Index([entry.label for entry in chosen], name="run"))
