"""Training with other frameworks: bytes between processes, and a comparison with labkit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    Finding,
    Markdown,
    clock_and_network,
    completed_entries,
    sentences,
)
from labkit.figures.kit.marks import matrix_panel
from labkit.figures.kit.sheet import overload, sheet
from labkit.records.analysis.scaling import FrameworkComparison, compare_frameworks, sent_bytes
from labkit.records.run import Run


def traffic_matrix(runs: Iterable[Run] | Run) -> Figure:
    """Draw the TCP bytes that other frameworks' processes send per step, with one panel per run.

    Args:
        runs: Runs of the strategies `TFDistribute` and `ExternalFramework` on Linux. The figure
            omits runs over MPI and on other systems, because their bytes are not counted.
    """
    shown = [entry for entry in completed_entries(runs) if not sent_bytes(entry.run).empty]
    panels, words = [], []
    for entry in shown:
        table = sent_bytes(entry.run)
        names = list(dict.fromkeys(table["source"]))
        values = table.pivot(index="source", columns="target", values="bytes").loc[names, names]
        axes = "to task (bytes per step)", "from task"
        verb = "sends %{z:,.0f} bytes per step to"
        panel = matrix_panel(entry.label, names, values.to_numpy(), bytes_text, verb, axes)
        panels.append([panel])
        details = [
            f"{row.source} sends {bytes_text(row.bytes)} to {row.target}"
            for row in table[table["bytes"] > 0].itertuples()
        ]
        words.append(f"{entry.label}: {', '.join(details) or 'processes exchange no bytes'}")
    title = "Bytes per step between processes of other frameworks"
    title += f" · {clock_and_network(shown)}" if shown else ""
    return sheet(panels, [], title, overload(shown), words, plot=220)


def framework_table(runs: Iterable[Run] | Run) -> pd.DataFrame:
    """Return a row per run: strategy, labkit's equivalent, costs of a step, and accuracy."""
    return _comparison(runs).table


def summarize_framework(runs: Iterable[Run] | Run) -> Markdown:
    """Compare each framework's step time and accuracy with labkit's for the same strategy.

    Raises:
        LabkitError: There are no runs, or a run has no results.
    """
    return sentences(_findings(_comparison(runs)))


def _comparison(runs: Iterable[Run] | Run) -> FrameworkComparison:
    return compare_frameworks({entry.label: entry.run for entry in completed_entries(runs)})


def _findings(results: FrameworkComparison) -> Iterator[Finding]:
    for theirs, ours in results.pairs:
        ratio = None
        unverified = [row for row in (theirs, ours) if row["equivalence"] != "passed"]
        times = "; ".join(map(_no_speed, unverified))
        if not unverified:
            ratio, same = theirs["step_ms"] / ours["step_ms"], theirs["labkit's"]
            times = (
                f"a step takes {seconds_text(theirs['step_ms'] / 1e3)}, and a step of labkit's "
                f"{same} takes {seconds_text(ours['step_ms'] / 1e3)}"
            )
        ends = f"final accuracy {theirs['accuracy']:.1%}, labkit's {ours['accuracy']:.1%}"
        yield Finding(
            head=f"**{theirs['strategy']}**",
            details=(ends, times),
            verdict=_verdict(ratio),
        )
    for theirs, why in results.unmatched:
        yield Finding(
            head=f"**{theirs['strategy']}**",
            details=(f"final accuracy {theirs['accuracy']:.1%}", f"not compared, because {why}"),
        )


def _no_speed(row: pd.Series) -> str:
    """Return the reason why a run has no value for its speed."""
    if row["equivalence"] == "failed":
        return f"the equivalence check of {row['strategy']} failed, so its speed is not shown"
    return (
        f"{row['strategy']} was not compared with training in one process, so its speed is not "
        f"shown: {row['why']}"
    )


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return ""
    if 0.9 <= ratio <= 1.1:
        return "equally fast"
    return f"{ratio:.3g} times as long" if ratio > 1 else f"{1 / ratio:.3g} times as fast"
