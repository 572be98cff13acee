"""What the figures of these runs show, in sentences made from their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from labkit.figures.kit.entries import Entry, settings
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.runs import speed
from labkit.records.run import Run, own_results, verdict

_OWN = 6  # so many results under names of the user's own are told


def reading(runs: Iterable[Run] | Run) -> Markdown:
    """Say for each run what it reached, whether it may be believed, where its steps went, and
    whether it paid against one worker.

    A difference in speed counts only where the spreads (p10 to p90 of the step time) stay apart;
    a difference in accuracy of one seed each is reported, not judged.
    """
    shown = settings(runs)
    found = [Finding(f"**{entry.label}**", said=tuple(_of_run(entry))) for entry in shown]
    found += _of_scalings(shown)
    found += [Finding(speed.refused(entry)) for entry in shown if entry.gate_failed]
    return sentences(found)


def _of_run(entry: Entry) -> list[str]:
    metrics = entry.metrics
    if not metrics:
        return [f"no results ({entry.run.status['state']})"]
    said = []
    if metrics.get("test_accuracy") is not None:
        said.append(f"{metrics['test_accuracy']:.1%} of the test data right")
    elif metrics.get("test_loss") is not None:
        said.append(f"test loss {metrics['test_loss']:.4g}")
    own = islice(own_results(entry.run).items(), _OWN)
    said += [f"{name} {value:.4g}" for name, value in own]
    said.append(f"equivalence {verdict(entry.run)}")
    history = entry.run.history
    parts = ("compute_seconds", "communicate_seconds", "wait_seconds")
    # The first step traces and compiles, which no later one does.
    steady = history[history["step"] > 0]
    total = steady["seconds"].sum()
    # One worker neither exchanges nor waits.
    if metrics.get("workers", 1) > 1 and total > 0:
        shares = " / ".join(f"{max(steady[part].sum(), 0) / total:.0%}" for part in parts)
        said.append(f"of its step time {shares} went into computing / exchange / waiting for ranks")
    return said


def _of_scalings(shown: Sequence[Entry]) -> list[Finding]:
    """A finding a run that was held against one worker."""
    labels = {entry.key: entry.label for entry in shown}
    table = speed.scaled(shown)
    return [
        Finding(
            f"**{labels[row.run]}** against {labels[row.baseline]} ({row.kind} scaling)",
            value=row.speedup,
            band=(row.speedup_low, row.speedup_high),
            text="{:.2f}".format,
            unit="x the samples a second",
            said=(f"efficiency {row.efficiency / 100:.0%}",),
            verdict=judged(row.speedup_low, row.speedup_high, "it costs more than it brings"),
        )
        for row in table[table["workers"] > 1].itertuples()
    ]


def judged(low: float, high: float, lost: str) -> str:
    """What the spread of a ratio of speeds allows to say."""
    if low > 1:
        return "it pays"
    return lost if high < 1 else "no difference beyond the spread of the steps"
