"""What precision costs and saves: accuracy, memory, bytes and seconds beside a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text
from labkit.figures.kit.entries import completed
from labkit.figures.kit.findings import Markdown
from labkit.records.analysis.precisions import KEPT, loss_scales, precisions
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

__all__ = ["loss_scale_reading", "loss_scales", "memory_reading", "precision_table"]

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
    return precisions({entry.label: entry.run for entry in completed(runs)}, baseline)


def memory_reading(runs: Iterable[Run] | Run, baseline: Run) -> Markdown:
    """What each run keeps in memory against the baseline, and what the peaks may be compared for.

    Raises: as `precision_table`.
    """
    shown = completed(runs)
    base = baseline.metrics["memory_bytes"]
    lines = [
        f"**{entry.label}** {_memory(entry.metrics['memory_bytes'], base)}."
        for entry in shown
        if entry.run.path != baseline.path
    ]
    # In the order in which they ran: a process keeps what it has taken, so that peaks only grow.
    in_order = sorted(shown, key=lambda entry: str(entry.run.status.get("started")))
    peaks = ", ".join(bytes_text(each.metrics["memory_bytes"]["peak"]) for each in in_order)
    lines.append(
        f"The most that a rank's process took, in the order of the runs: {peaks}. The same "
        "processes ran them all and keep what earlier runs have taken, TensorFlow itself "
        "included: an upper bound of each, and no measure of one precision against another."
    )
    return Markdown("\n".join(f"- {line}" for line in lines))


def loss_scale_reading(rows: Iterable[Mapping[str, float]]) -> Markdown:
    """Which steps were skipped, by which ranks, and whether all had the same scale throughout.

    Args:
        rows: as for `loss_scales`.
    """
    table = loss_scales(rows)
    made = table["updates"].diff().fillna(table["updates"])  # 0 where a step was skipped
    skipped = [
        f"step {step} by "
        + ("all ranks" if own.all() else f"rank {', '.join(map(str, own[own].index))} only")
        for step, own in (made == 0).iterrows()
        if own.any()
    ]
    alike = (table["loss_scale"].nunique(axis=1) == 1).all() and (made.nunique(axis=1) == 1).all()
    return Markdown(
        f"Skipped: {'; '.join(skipped) or 'no step'}. The ranks "
        + ("had the same loss scale after every step." if alike else "**did not stay alike**.")
    )


def _memory(own: dict[str, float], base: dict[str, float]) -> str:
    """`keeps 1.6 MB of weights (2x), …` or `keeps as many bytes as the baseline`."""
    more = [
        f"{bytes_text(own[kind])} of {kind} ({own[kind] / base[kind]:.3g}x)"
        for kind in KEPT
        if base[kind] and abs(own[kind] - base[kind]) > _SAME * sum(base[each] for each in KEPT)
    ]
    return f"keeps {', '.join(more)}" if more else "keeps as many bytes as the baseline"
