"""Accuracy against bytes and against seconds, and which runs no other run beats in all three."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.axes import shares
from labkit.figures.kit.entries import Entry, clock_and_network, settings
from labkit.figures.kit.marks import Looks, points_with_bars, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import Sheet, busy
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.spending import MEASURES, front, spending
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

_NAMED = 3  # so many are named in a note
_COSTS = {
    "bytes": ("bytes after the first step, all ranks", bytes_axis, bytes_text),
    "seconds": ("seconds after the first step", seconds_axis, seconds_text),
}


def pareto(runs: Iterable[Run] | Run) -> Figure:
    """Test accuracy over bytes on the wire and over seconds, with the Pareto front of each panel.

    Error bars span the seeds. A filled marker: no other run on its network and clock is at least as
    good in accuracy, bytes and seconds, and better in one. A run whose equivalence gate failed has
    no seconds. Raises LabkitError where there are no runs.
    """
    return pareto_sheet(settings(runs)).figure()


def pareto_sheet(shown: Sequence[Entry]) -> Sheet:
    """The same, of entries."""
    looks: dict[str, Entry] = {entry.key: entry for entry in shown}
    table = spending({key: entry.run for key, entry in looks.items()})
    # Filled by all three measures, though a panel shows two: no run looks beaten that is not.
    table["open"] = ~table.index.isin(front(table, MEASURES).index)
    panels = [_panel(table, looks, cost, refusals(shown)) for cost in _COSTS]
    remarks = [
        "filled: no run on its network is better in accuracy, bytes and seconds; bars: seeds"
    ]
    known = set(table["run"])
    missing = [entry.label for entry in shown if entry.key not in known]
    remarks += [f"not completed, or without test accuracy: {', '.join(missing)}"] if missing else []
    title = f"Accuracy × bytes × seconds · {clock_and_network(shown)}"
    words = [f"{looks[row['run']].label}: {_said(row)}" for row in table.to_dict("records")]
    said = [*words, refusals(shown)]
    return Sheet([panels], shown, title, [*remarks, *busy(shown)], said, plot=280)


def _panel(table: pd.DataFrame, looks: Looks, cost: str, refused: str) -> Panel:
    x, axis, text = _COSTS[cost]
    # A logarithm of nothing cannot be drawn: one worker sends no bytes.
    drawn = table[table[f"{cost}_low"] > 0]
    said = [f"{y:.2%}, {text(x)}" for x, y in zip(drawn[cost], drawn["accuracy"], strict=True)]
    drawn = drawn.assign(hover=said)
    none = "" if len(drawn) else f"no run with a test accuracy and {cost}"
    silent = [looks[run].label for run in table["run"][table["bytes_low"] <= 0]]
    more = f" and {len(silent) - _NAMED} more" if silent[_NAMED:] else ""
    left = f"left out, for no link carried a byte: {'; '.join(silent[:_NAMED])}{more}"
    said_below = (refused if cost == "seconds" else left if silent else "", none)
    note = "\n".join(part for part in said_below if part)
    # Room for whole ticks, where all runs spend about the same.
    ends = (drawn[f"{cost}_low"].min() / 2, drawn[f"{cost}_high"].max() * 2)
    return Panel(
        title=f"Accuracy by {cost} of the whole training\nline: Pareto front",
        x=x,
        y="test accuracy",
        traces=[*_fronts(drawn, cost), *points_with_bars(drawn, cost, "accuracy", looks, size=11)],
        note=note,
        always_note=bool(note),
        x_axis=axis(*ends) if len(drawn) else {},
        y_axis=shares([*table["accuracy_low"], *table["accuracy_high"]]),
    )


def _fronts(drawn: pd.DataFrame, cost: str) -> list[Trace]:
    """Steps from the cheapest run to the best; by seconds, a front a network and clock."""
    best = front(drawn, ("accuracy", cost)).sort_values(cost)
    links = best.groupby(["network", "clock"], sort=False)
    groups = [best] if cost == "bytes" else [own for _, own in links]
    # Steps, not straight lines: between two runs nothing was measured.
    line = rule([], [], "dot")["line"] | {"width": 1.5, "shape": "hv"}
    look = {"name": "Pareto front", "line": line}
    return [rule(list(own[cost]), list(own["accuracy"])) | look for own in groups if len(own)]


def _said(row: dict[str, float]) -> str:
    said = [f"accuracy {row['accuracy']:.2%}", bytes_text(row["bytes"])]
    if row["seconds"] == row["seconds"]:  # NaN is not
        said.append(seconds_text(row["seconds"]))
    return f"{', '.join(said)}{'' if row['open'] else ' (on the front)'}"
