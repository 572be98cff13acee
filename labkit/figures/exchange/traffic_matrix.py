"""Other frameworks' strategies: who sends how much to whom, and how they stand beside labkit's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.cells import cells, towards
from labkit.figures.kit.entries import Entry, clock_and_network, completed
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.records.analysis.frameworks import FrameworkComparison, beside, sent
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

PALE = towards("213,94,0", 0.3)


def traffic_matrix(runs: Iterable[Run] | Run) -> Figure:
    """Bytes a step from each task to each other one, a panel a run; of processes on TCP.

    Args:
        runs: of `TFDistribute` and `Peer`; others, whose messages go by MPI, are left out, and
            those that ran on a system that does not count, as all but Linux.
    """
    shown = [entry for entry in completed(runs) if not sent(entry.run).empty]
    panels, words = [], []
    for entry in shown:
        table = sent(entry.run)
        panels.append([_panel(entry, table)])
        said = [
            f"{row.source} sends {bytes_text(row.bytes)} to {row.target}"
            for row in table[table["bytes"] > 0].itertuples()
        ]
        words.append(f"{entry.label}: {', '.join(said) or 'nothing crosses between processes'}")
    title = "Bytes a step between processes of other frameworks"
    title += f" · {clock_and_network(shown)}" if shown else ""
    return sheet(panels, [], title, busy(shown), words, plot=220)


def framework_table(runs: Iterable[Run] | Run) -> pd.DataFrame:
    """A row a run: which strategy, its place among labkit's, what a step costs, where it ends."""
    return _beside(runs).table


def framework_reading(runs: Iterable[Run] | Run) -> Markdown:
    """Of each of theirs: its step and its end beside labkit's strategy that does the same.

    Raises: as `framework_table`.
    """
    return sentences(_said(_beside(runs)))


def _beside(runs: Iterable[Run] | Run) -> FrameworkComparison:
    return beside({entry.label: entry.run for entry in completed(runs)})


def _said(found: FrameworkComparison) -> Iterator[Finding]:
    for theirs, ours in found.pairs:
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
            said=(ends, times),
            verdict=_verdict(ratio),
        )
    for theirs, why in found.alone:
        yield Finding(
            what=f"**{theirs['strategy']}**",
            said=(f"accuracy at the end {theirs['accuracy']:.1%}", f"not compared, as {why}"),
        )


def _no_speed(row: pd.Series) -> str:
    """Why a run has no speed to be shown."""
    if row["gate"] == "failed":
        return f"the gate of {row['strategy']} failed, so that it has no speed"
    return f"{row['strategy']} was not held against one process, and has no speed: {row['why']}"


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return ""
    if 0.9 <= ratio <= 1.1:
        return "as fast"
    return f"{ratio:.3g} times as long" if ratio > 1 else f"{1 / ratio:.3g} times as fast"


def _panel(entry: Entry, table: pd.DataFrame) -> Panel:
    names = list(dict.fromkeys(table["source"]))
    values = table.pivot(index="source", columns="target", values="bytes").loc[names, names]
    heat = cells(
        values.to_numpy(),
        names,
        names,
        PALE,
        max(1.0, float(values.to_numpy().max())),
        "%{y} sends %{z:,.0f} bytes a step to %{x}",
        gap=1,
        texts=[[bytes_text(each) if each else "·" for each in row] for row in values.to_numpy()],
    )
    plain = {"type": "category", "showgrid": False, "nticks": len(names)}
    return Panel(
        title=entry.label,
        x="to task (bytes a step)",
        y="from task",
        traces=[heat],
        x_axis=dict(plain),
        y_axis=plain | {"autorange": "reversed"},
    )
