"""Scatter plots of runs, with any two parameters or metrics; Pareto fronts of accuracy and cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from labkit.common.canonical_json import is_number
from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import RunEntry, clock_and_network, safe_text, settings
from labkit.figures.kit.marks import Looks, points_with_bars, rule
from labkit.figures.kit.panels import SHARES, Panel, Trace, shares, text_of, title_of, word
from labkit.figures.kit.sheet import Sheet, overload, sheet
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.columns import (
    Value,
    is_timed,
    parameters,
    seed_range,
    sorted_values,
    values_of,
)
from labkit.records.analysis.spending import MEASURES, front, spending
from labkit.records.run import Run

# An axis is logarithmic if its greatest value is at least this multiple of its least value.
_WIDE = 30.0


def scatter(runs: Iterable[Run] | Run, x: str, y: str) -> Figure:
    """Draw metric or parameter `y` over `x`: one marker per run, with error bars over seeds.

    Args:
        runs: Runs to compare.
        x, y: Names of metrics, or of parameters that differ between the runs, as in
            `lk.to_dataframe(runs)`.

    Raises:
        LabkitError: There are no runs.
        InvalidInput: No run has a parameter or metric with the name x or y.
    """
    shown = settings(runs)
    all_runs = [entry.run for entry in shown]
    across, up = values_of(all_runs, x), values_of(all_runs, y)
    parameter_names = parameters(all_runs)
    refused = refusals(shown) if is_timed(x) or is_timed(y) else ""
    panel = Panel(
        title="",
        x=title_of(x),
        y=title_of(y),
        traces=points_with_bars(
            _table(shown, (x, across), (y, up)), "x", "y", {entry.key: entry for entry in shown}
        ),
        note=refused or f"no run has both {title_of(x)} and {title_of(y)}",
        always_note=bool(refused),
        x_axis=_axis(x, across, x in parameter_names),
        y_axis=_axis(y, up, y in parameter_names),
    )
    title = f"{title_of(y).capitalize()} by {title_of(x)} · {clock_and_network(shown)}"
    words = [
        f"{entry.label}: {title_of(y)} {text_of(y, up[place])}, {title_of(x)} "
        f"{text_of(x, across[place])}"
        for place, entry in enumerate(shown)
    ]
    return sheet([[panel]], shown, title, overload(shown), [*words, refused], plot=300)


def _table(
    shown: Sequence[RunEntry], x: tuple[str, list[Value]], y: tuple[str, list[Value]]
) -> pd.DataFrame:
    """Return one row per run that has both x and y, with axis positions and ranges over seeds."""
    rows = []
    for place, entry in enumerate(shown):
        row: dict[str, str | float] = {"run": entry.key}
        for axis, (name, values) in (("x", x), ("y", y)):
            if values[place] is not None:
                row[axis] = _place(values, values[place])
                # Without a range over seeds, both ends of the error bar equal the value. An error
                # bar with equal ends is invisible.
                ends = seed_range(entry.run, name) or (row[axis], row[axis])
                row[f"{axis}_low"], row[f"{axis}_high"] = ends
        row["hover"] = safe_text(f"{text_of(y[0], y[1][place])}, {text_of(x[0], x[1][place])}")
        rows.append(row)
    return pd.DataFrame([row for row in rows if "x" in row and "y" in row], columns=_COLUMNS)


_COLUMNS = ["run", *(f"{axis}{end}" for axis in "xy" for end in ("", "_low", "_high")), "hover"]


def _place(values: Sequence[Value], value: Value) -> float:
    """Return a value's axis position: the number itself, or the index of a text in `values`."""
    if _words(values):
        return float([repr(slot) for slot in sorted_values(values)].index(repr(value)))
    return float(value or 0.0)


def _words(values: Sequence[Value]) -> bool:
    return any(isinstance(value, str | bool) for value in values)


def _axis(name: str, values: Sequence[Value], is_parameter: bool) -> Trace:
    if _words(values):
        slots = sorted_values(values)
        texts = [safe_text(word(name, slot)) for slot in slots]
        return {"tickvals": list(range(len(slots))), "ticktext": texts}
    known = [value for value in values if is_number(value)]
    ticks: Trace = dict(SHARES) if name.endswith("accuracy") else {}
    # A parameter with few distinct values has a tick at each value.
    if is_parameter and len(set(known)) <= 8:
        ticks = {"tickvals": sorted(set(known))}
    wide = bool(known) and min(known) > 0 and max(known) / min(known) >= _WIDE
    return ticks | ({"type": "log"} if wide else {})


_NAMED = 3  # greatest number of run names in a note
_COSTS = {
    "bytes": ("bytes sent after the first step, all ranks", bytes_axis, bytes_text),
    "seconds": ("seconds after the first step", seconds_axis, seconds_text),
}


def pareto(runs: Iterable[Run] | Run) -> Figure:
    """Draw the Pareto fronts of test accuracy over bytes on the wire and over seconds.

    Error bars show the range over random seeds. A marker is filled if no other run with the same
    network and clock dominates the marker's run. A dominating run is at least as good in accuracy,
    bytes and seconds. A dominating run is also better in at least one of the three values. A run
    that failed its equivalence check has no value in seconds.

    Raises:
        LabkitError: There are no runs.
    """
    return pareto_sheet(settings(runs)).figure()


def pareto_sheet(entries: Sequence[RunEntry]) -> Sheet:
    """Return the panels and texts of the figure `pareto` for the given runs."""
    looks: dict[str, RunEntry] = {entry.key: entry for entry in entries}
    table = spending({key: entry.run for key, entry in looks.items()})
    # Each panel shows only accuracy and one cost. Accuracy, bytes and seconds together decide
    # whether a marker is filled.
    table["open"] = ~table.index.isin(front(table, MEASURES).index)
    panels = [_panel(table, looks, cost, refusals(entries)) for cost in _COSTS]
    remarks = [
        "filled marker: no run on the same network is better in accuracy, bytes and seconds; "
        "error bar: range over seeds"
    ]
    known = set(table["run"])
    missing = [entry.label for entry in entries if entry.key not in known]
    remarks += [f"not completed, or without test accuracy: {', '.join(missing)}"] if missing else []
    title = f"Accuracy × bytes × seconds · {clock_and_network(entries)}"
    words = [f"{looks[row['run']].label}: {_run_in_words(row)}" for row in table.to_dict("records")]
    details = [*words, refusals(entries)]
    return Sheet([panels], entries, title, [*remarks, *overload(entries)], details, plot=280)


def _panel(table: pd.DataFrame, looks: Looks, cost: str, refused: str) -> Panel:
    x, axis, text = _COSTS[cost]
    # Runs with a single worker send no bytes; they are omitted, because a logarithmic axis cannot
    # show zero.
    drawn = table[table[f"{cost}_low"] > 0]
    hover = [f"{y:.2%}, {text(x)}" for x, y in zip(drawn[cost], drawn["accuracy"], strict=True)]
    drawn = drawn.assign(hover=hover)
    none = "" if len(drawn) else f"no run has both a test accuracy and {cost}"
    silent = [looks[run].label for run in table["run"][table["bytes_low"] <= 0]]
    more = f" and {len(silent) - _NAMED} more" if silent[_NAMED:] else ""
    not_shown = (
        f"not shown, because no network link carried bytes: {'; '.join(silent[:_NAMED])}{more}"
    )
    notes = (refused if cost == "seconds" else not_shown if silent else "", none)
    note = "\n".join(part for part in notes if part)
    # The factor 2 at both ends makes room for several ticks, even if all costs are about equal.
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
    """Return the lines that draw the Pareto fronts."""
    best = front(drawn, ("accuracy", cost)).sort_values(cost)
    links = best.groupby(["network", "clock"], sort=False)
    groups = [best] if cost == "bytes" else [group for _, group in links]
    # The Pareto front is a step line, because nothing was measured between two runs.
    line = rule([], [], "dot")["line"] | {"width": 1.5, "shape": "hv"}
    look = {"name": "Pareto front", "line": line}
    return [
        rule(list(group[cost]), list(group["accuracy"])) | look for group in groups if len(group)
    ]


def _run_in_words(row: dict[str, float]) -> str:
    details = [f"accuracy {row['accuracy']:.2%}", bytes_text(row["bytes"])]
    # The condition excludes a run without speed: its seconds are NaN, and NaN does not equal
    # itself.
    if row["seconds"] == row["seconds"]:
        details.append(seconds_text(row["seconds"]))
    return f"{', '.join(details)}{'' if row['open'] else ' (on the front)'}"
