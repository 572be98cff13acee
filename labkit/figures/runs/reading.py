"""What the figures of these runs show, in sentences made from their numbers."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import Entry
from labkit.figures.kit.finding import Markdown
from labkit.figures.runs import speed
from labkit.records.run import Run, verdict


def reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say for each run what it reached, whether it may be believed, where its steps went, and
    whether it paid against one worker.

    A difference in speed counts only where the spreads (p10 to p90 of the step time) stay apart;
    a difference in accuracy of one seed each is reported, not judged.
    """
    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    lines = [f"- **{entry.label}**: {'; '.join(_of_run(entry))}." for entry in shown]
    lines += [f"- {_of_scaling(point)}" for point in speed.scalings(shown) if point.workers > 1]
    lines += [f"- {speed.refused(entry)}" for entry in shown if entry.gate_failed]
    return Markdown("\n".join(lines))


def _of_run(entry: Entry) -> list[str]:
    metrics = entry.metrics
    if not metrics:
        return [f"no results ({entry.run.status['state']})"]
    said = []
    if metrics.get("test_accuracy") is not None:
        said.append(f"{metrics['test_accuracy']:.1%} of the test data right")
    elif metrics.get("test_loss") is not None:
        said.append(f"test loss {metrics['test_loss']:.4g}")
    said.append(f"equivalence {verdict(entry.run)}")
    history = entry.run.history
    parts = ("compute_seconds", "communicate_seconds", "wait_seconds")
    steady = history[history["step"] > 0]
    total = steady["seconds"].sum()
    if metrics.get("workers", 1) > 1 and total > 0:
        shares = " / ".join(f"{max(steady[part].sum(), 0) / total:.0%}" for part in parts)
        said.append(f"of its step time {shares} went into computing / exchange / waiting for ranks")
    return said


def _of_scaling(point: speed.Scaling) -> str:
    if point.low > 1:
        judged = "it pays"
    elif point.high < 1:
        judged = "it costs more than it brings"
    else:
        judged = "no difference beyond the spread of the steps"
    return (
        f"**{point.entry.label}** against {point.baseline.label} ({point.kind} scaling): "
        f"{point.speedup:.2f}x the samples a second "
        f"(spread {point.low:.2f} to {point.high:.2f}), "
        f"efficiency {point.speedup / point.workers:.0%}: {judged}."
    )
