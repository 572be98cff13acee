"""Any number of the runs over any other: what was measured, or a parameter that differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.common.canonical_json import is_number
from labkit.figures.kit.axes import SHARES, text_of, title_of, word
from labkit.figures.kit.entries import Entry, clock_and_network, safe_text, settings
from labkit.figures.kit.marks import points_with_bars
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.columns import (
    Value,
    is_timed,
    ordered,
    parameters,
    spread,
    values_of,
)
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

_WIDE = 30.0  # from this ratio on an axis is logarithmic


def scatter(runs: Iterable[Run] | Run, x: str, y: str) -> Figure:
    """One number of each run over another, a marker a run; bars span the seeds.

    Args: runs: to compare; x, y: names of parameters that differ or of metrics, as in
    `lk.frame(runs)`.
    Raises: LabkitError where there are no runs; InvalidInput, a name that no run has.
    """
    shown = settings(runs)
    found = [entry.run for entry in shown]
    across, up = values_of(found, x), values_of(found, y)
    given = parameters(found)
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
        x_axis=_axis(x, across, x in given),
        y_axis=_axis(y, up, y in given),
    )
    title = f"{title_of(y).capitalize()} by {title_of(x)} · {clock_and_network(shown)}"
    words = [
        f"{entry.label}: {title_of(y)} {text_of(y, up[place])}, {title_of(x)} "
        f"{text_of(x, across[place])}"
        for place, entry in enumerate(shown)
    ]
    return sheet([[panel]], shown, title, busy(shown), [*words, refused], plot=300)


def _table(
    shown: Sequence[Entry], x: tuple[str, list[Value]], y: tuple[str, list[Value]]
) -> pd.DataFrame:
    """A row a run that has both: their places on the axes, and the seeds' spread."""
    import pandas as pd

    rows = []
    for place, entry in enumerate(shown):
        row: dict[str, str | float] = {"run": entry.key}
        for axis, (name, values) in (("x", x), ("y", y)):
            if values[place] is not None:
                row[axis] = _place(values, values[place])
                # One seed has no spread: ends at the value draw no bar.
                ends = spread(entry.run, name) or (row[axis], row[axis])
                row[f"{axis}_low"], row[f"{axis}_high"] = ends
        row["hover"] = safe_text(f"{text_of(y[0], y[1][place])}, {text_of(x[0], x[1][place])}")
        rows.append(row)
    return pd.DataFrame([row for row in rows if "x" in row and "y" in row], columns=_COLUMNS)


_COLUMNS = ["run", *(f"{axis}{end}" for axis in "xy" for end in ("", "_low", "_high")), "hover"]


def _place(values: Sequence[Value], value: Value) -> float:
    """A number stands for itself; among words, a value for its slot."""
    if _words(values):
        return float([repr(slot) for slot in ordered(values)].index(repr(value)))
    return float(value or 0.0)


def _words(values: Sequence[Value]) -> bool:
    return any(isinstance(value, str | bool) for value in values)


def _axis(name: str, values: Sequence[Value], asked: bool) -> Trace:
    if _words(values):
        slots = ordered(values)
        texts = [safe_text(word(name, slot)) for slot in slots]
        return {"tickvals": list(range(len(slots))), "ticktext": texts}
    known = [value for value in values if is_number(value)]
    ticks: Trace = dict(SHARES) if name.endswith("accuracy") else {}
    # Parameters are chosen by a person, who looks for just these values on the axis.
    if asked and len(set(known)) <= 8:
        ticks = {"tickvals": sorted(set(known))}
    wide = bool(known) and min(known) > 0 and max(known) / min(known) >= _WIDE
    return ticks | ({"type": "log"} if wide else {})
