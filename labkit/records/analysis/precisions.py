"""What precision costs and saves, run by run, and how a loss scale moved step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.records.compressors import compressor_of
from labkit.records.run import Run, gate_failed
from labkit.records.verdict import accuracies, judge_runs

if TYPE_CHECKING:
    import pandas

KEPT = ("weights", "gradients", "optimizer")  # bytes that a rank keeps from step to step
_VERDICTS = {"loss": "loss", "no loss": "no loss", "none": "no verdict"}


def precisions(runs: Mapping[str, Run], baseline: Run) -> pandas.DataFrame:
    """A row a run: precision of compute and wire, accuracy and verdict, bytes, milliseconds.

    `weights_bytes`, `gradients_bytes`, `optimizer_bytes` and `peak_bytes` are those of the rank
    that has most; a run whose equivalence gate failed has no milliseconds.

    Args:
        runs: completed ones by name, the baseline among them or not.
        baseline: against which accuracy is judged.
    """
    import pandas as pd

    rows = {name: _row(run, baseline) for name, run in runs.items()}
    return pd.DataFrame(list(rows.values()), index=pd.Index(rows, name="run"))


def loss_scales(rows: Iterable[Mapping[str, float]]) -> pandas.DataFrame:
    """The loss scale and the updates made so far, a row a step, a column a rank.

    Args:
        rows: of all ranks, with `step`, `rank`, `loss_scale` and `updates`.
    """
    import pandas as pd

    return pd.DataFrame(list(rows)).pivot(
        index="step", columns="rank", values=["loss_scale", "updates"]
    )


def _row(run: Run, baseline: Run) -> dict[str, JSON]:
    metrics, fields = run.metrics, run.experiment
    found = list(accuracies(run).values())
    missing = float("nan")
    own, refused = run.path == baseline.path, gate_failed(run)
    return {
        "compute": fields["precision"],
        "wire": (compressor_of(run) or {}).get("name", "as the gradients"),
        "test_accuracy": sum(found) / len(found) if found else missing,
        "verdict": "baseline" if own else _VERDICTS[judge_runs(run, baseline).kind],
        **{f"{kind}_bytes": metrics["memory_bytes"][kind] for kind in (*KEPT, "peak")},
        "payload_bytes_per_step": metrics["payload_bytes_per_step"],
        "wire_bytes_per_step": metrics["wire_bytes_per_step"],
        "step_ms": missing if refused else metrics["step_ms"]["median"],
        "codec_ms": missing if refused else metrics["codec_ms_per_step"],
    }
