"""What precision costs and saves: accuracy, memory, bytes and seconds beside a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.common.content import JSON
from labkit.common.errors import LabkitError
from labkit.common.units import bytes_text
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry
from labkit.figures.kit.findings import Markdown
from labkit.records.compressors import compressor_of
from labkit.records.run import Run
from labkit.records.verdict import accuracies, judge_runs

if TYPE_CHECKING:
    import pandas

KEPT = ("weights", "gradients", "optimizer")  # bytes that a rank keeps from step to step
_VERDICTS = {"loss": "loss", "no loss": "no loss", "none": "no verdict"}
_SAME = 0.005  # relative: the few bytes of a loss scale are no more memory


def precision_table(runs: Iterable[Run] | Run, baseline: Run) -> pandas.DataFrame:
    """A row a run: precision of compute and wire, accuracy and verdict, bytes, milliseconds.

    `weights_bytes`, `gradients_bytes`, `optimizer_bytes` and `peak_bytes` are those of the rank
    that has most; a run whose equivalence gate failed has no milliseconds.

    Args:
        runs: the baseline among them or not.
        baseline: against which accuracy is judged.

    Raises: LabkitError, where there are no runs, or one has no results.
    """
    import pandas as pd

    shown = _completed(runs)
    rows = [_row(entry, baseline) for entry in shown]
    return pd.DataFrame(rows, index=pd.Index([entry.label for entry in shown], name="run"))


def memory_reading(runs: Iterable[Run] | Run, baseline: Run) -> Markdown:
    """What each run keeps in memory against the baseline, and what the peaks may be compared for.

    Raises: as `precision_table`.
    """
    shown = _completed(runs)
    base = baseline.metrics["memory_bytes"]
    lines = [
        f"**{entry.label}** {_memory(entry.metrics['memory_bytes'], base)}."
        for entry in shown
        if entry.run.path != baseline.path
    ]
    peaks = ", ".join(bytes_text(e.metrics["memory_bytes"]["peak"]) for e in _in_order(shown))
    lines.append(
        f"The most that a rank's process took, in the order of the runs: {peaks}. The same "
        "processes ran them all and keep what earlier runs have taken, TensorFlow itself "
        "included: an upper bound of each, and no measure of one precision against another."
    )
    return Markdown("\n".join(f"- {line}" for line in lines))


def loss_scales(rows: Iterable[Mapping[str, float]]) -> pandas.DataFrame:
    """The loss scale and the updates made so far, a row a step, a column a rank.

    Args:
        rows: of all ranks, with `step`, `rank`, `loss_scale` and `updates`.
    """
    import pandas as pd

    seen = pd.DataFrame(list(rows))
    values = ("loss_scale", "updates")
    return pd.concat(
        {v: seen.pivot(index="step", columns="rank", values=v) for v in values}, axis=1
    )


def loss_scale_reading(rows: Iterable[Mapping[str, float]]) -> Markdown:
    """Which steps were skipped, by which ranks, and whether all had the same scale throughout.

    Args:
        rows: as for `loss_scales`.
    """
    table = loss_scales(rows)
    made = table["updates"].diff().fillna(table["updates"])  # 0 where a step was skipped
    skipped = [
        f"step {step} by {'all ranks' if own.all() else _ranks(own[own].index)}"
        for step, own in (made == 0).iterrows()
        if own.any()
    ]
    alike = (table["loss_scale"].nunique(axis=1) == 1).all() and (made.nunique(axis=1) == 1).all()
    return Markdown(
        f"Skipped: {'; '.join(skipped) or 'no step'}. The ranks "
        + ("had the same loss scale after every step." if alike else "**did not stay alike**.")
    )


def _completed(runs: Iterable[Run] | Run) -> list[Entry]:
    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    missing = [entry.label for entry in shown if not entry.metrics]
    if missing:
        raise LabkitError(f"no results of {', '.join(missing)}: give completed runs")
    return shown


def _in_order(shown: Sequence[Entry]) -> list[Entry]:
    return sorted(shown, key=lambda entry: str(entry.run.status.get("started")))


def _row(entry: Entry, baseline: Run) -> dict[str, JSON]:
    metrics, fields = entry.metrics, entry.run.experiment
    found = list(accuracies(entry.run).values())
    missing = float("nan")
    own = entry.run.path == baseline.path
    return {
        "compute": fields["precision"],
        "wire": (compressor_of(entry.run) or {}).get("name", "as the gradients"),
        "test_accuracy": sum(found) / len(found) if found else missing,
        "verdict": "baseline" if own else _VERDICTS[judge_runs(entry.run, baseline).kind],
        **{f"{kind}_bytes": metrics["memory_bytes"][kind] for kind in (*KEPT, "peak")},
        "payload_bytes_per_step": metrics["payload_bytes_per_step"],
        "wire_bytes_per_step": metrics["wire_bytes_per_step"],
        "step_ms": missing if entry.gate_failed else metrics["step_ms"]["median"],
        "codec_ms": missing if entry.gate_failed else metrics["codec_ms_per_step"],
    }


def _memory(own: dict[str, float], base: dict[str, float]) -> str:
    """`keeps 1.6 MB of weights (2x), …` or `keeps as many bytes as the baseline`."""
    more = [
        f"{bytes_text(own[kind])} of {kind} ({own[kind] / base[kind]:.3g}x)"
        for kind in KEPT
        if base[kind] and abs(own[kind] - base[kind]) > _SAME * sum(base[each] for each in KEPT)
    ]
    return f"keeps {', '.join(more)}" if more else "keeps as many bytes as the baseline"


def _ranks(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, ranks))} only"
