"""Strategies of other frameworks: bytes between processes, and steps beside those of labkit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import clock_and_network, completed_entries
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import matrix_panel
from labkit.figures.kit.sheet import overload, sheet
from labkit.records.analysis.frameworks import FrameworkComparison, beside, sent
from labkit.records.run import Run


def traffic_matrix(runs: Iterable[Run] | Run) -> Figure:
    """Draw the bytes a step between tasks of other frameworks over TCP, a panel a run.

    Args:
        runs: of `TFDistribute` and `Peer`; others, whose messages go by MPI, are left out, and
            those that ran on a system that does not count, as all but Linux.
    """
    shown = [entry for entry in completed_entries(runs) if not sent(entry.run).empty]
    panels, words = [], []
    for entry in shown:
        table = sent(entry.run)
        names = list(dict.fromkeys(table["source"]))
        values = table.pivot(index="source", columns="target", values="bytes").loc[names, names]
        axes = "to task (bytes a step)", "from task"
        verb = "sends %{z:,.0f} bytes a step to"
        panel = matrix_panel(entry.label, names, values.to_numpy(), bytes_text, verb, axes)
        panels.append([panel])
        details = [
            f"{row.source} sends {bytes_text(row.bytes)} to {row.target}"
            for row in table[table["bytes"] > 0].itertuples()
        ]
        words.append(f"{entry.label}: {', '.join(details) or 'nothing crosses between processes'}")
    title = "Bytes a step between processes of other frameworks"
    title += f" · {clock_and_network(shown)}" if shown else ""
    return sheet(panels, [], title, overload(shown), words, plot=220)


def framework_table(runs: Iterable[Run] | Run) -> pd.DataFrame:
    """Return a row a run: its strategy, the same of labkit, the cost of a step, the accuracy."""
    return _beside(runs).table


def framework_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Compare the step and the accuracy of each framework with the same strategy of labkit.

    Raises: as `framework_table`.
    """
    return sentences(_said(_beside(runs)))


def _beside(runs: Iterable[Run] | Run) -> FrameworkComparison:
    return beside({entry.label: entry.run for entry in completed_entries(runs)})


def _said(results: FrameworkComparison) -> Iterator[Finding]:
    for theirs, ours in results.pairs:
        ratio = None
        unheld = [row for row in (theirs, ours) if row["gate"] != "passed"]
        times = "; ".join(map(_no_speed, unheld))
        if not unheld:
            ratio, same = theirs["step_ms"] / ours["step_ms"], theirs["labkit's"]
            times = (
                f"a step takes {seconds_text(theirs['step_ms'] / 1e3)}, that of labkit's "
                f"{same} {seconds_text(ours['step_ms'] / 1e3)}"
            )
        ends = f"accuracy at the end {theirs['accuracy']:.1%}, and {ours['accuracy']:.1%}"
        yield Finding(
            what=f"**{theirs['strategy']}**",
            details=(ends, times),
            verdict=_verdict(ratio),
        )
    for theirs, why in results.alone:
        yield Finding(
            what=f"**{theirs['strategy']}**",
            details=(f"accuracy at the end {theirs['accuracy']:.1%}", f"not compared, as {why}"),
        )


def _no_speed(row: pd.Series) -> str:
    """Return why a run has no speed."""
    if row["gate"] == "failed":
        return f"the gate of {row['strategy']} failed, so that it has no speed"
    return f"{row['strategy']} was not held against one process, and has no speed: {row['why']}"


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return ""
    if 0.9 <= ratio <= 1.1:
        return "as fast"
    return f"{ratio:.3g} times as long" if ratio > 1 else f"{1 / ratio:.3g} times as fast"
