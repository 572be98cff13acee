"""Costs and savings of numeric precisions in each run, and loss scales at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.records.compressors import compressor_of
from labkit.records.run import Run, equivalence_failed
from labkit.records.verdict import accuracies, judge_runs

if TYPE_CHECKING:
    import pandas

# Kinds of memory that are used throughout training.
PERSISTENT_MEMORY = ("weights", "gradients", "optimizer")
_VERDICTS = {"loss": "loss", "no loss": "no loss", "none": "no verdict"}


def precisions(runs: Mapping[str, Run], baseline: Run) -> pandas.DataFrame:
    """Return one row per run: precision, accuracy, verification, bytes and times.

    The columns `weights_bytes`, `gradients_bytes`, `optimizer_bytes` and `peak_bytes` contain
    maxima over ranks. For runs that failed verification, the times are missing.

    Args:
        runs: Completed runs by name, which may include the baseline.
        baseline: Run with whose accuracy the accuracies of the other runs are compared.
    """
    import pandas as pd

    rows = {name: _row(run, baseline) for name, run in runs.items()}
    return pd.DataFrame(list(rows.values()), index=pd.Index(rows, name="run"))


def loss_scales(rows: Iterable[Mapping[str, float]]) -> pandas.DataFrame:
    """Return a table of loss scales and update counts, one row per step and columns for each rank.

    Args:
        rows: Records of all ranks and steps, each with `step`, `rank`, `loss_scale` and `updates`.
    """
    import pandas as pd

    return pd.DataFrame(list(rows)).pivot(
        index="step", columns="rank", values=["loss_scale", "updates"]
    )


def _row(run: Run, baseline: Run) -> dict[str, JSON]:
    metrics, fields = run.metrics, run.experiment
    values = list(accuracies(run).values())
    missing = float("nan")
    is_baseline, failed = run.path == baseline.path, equivalence_failed(run)
    return {
        "compute": fields["precision"],
        "wire": (compressor_of(run) or {}).get("name", "as the gradients"),
        "test_accuracy": sum(values) / len(values) if values else missing,
        "verdict": "baseline" if is_baseline else _VERDICTS[judge_runs(run, baseline).kind],
        **{f"{kind}_bytes": metrics["memory_bytes"][kind] for kind in (*PERSISTENT_MEMORY, "peak")},
        "payload_bytes_per_step": metrics["payload_bytes_per_step"],
        "wire_bytes_per_step": metrics["wire_bytes_per_step"],
        "step_ms": missing if failed else metrics["step_ms"]["median"],
        "codec_ms": missing if failed else metrics["codec_ms_per_step"],
    }
