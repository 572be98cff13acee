"""Any number of the runs over any other: what was measured, or a parameter that differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from labkit.figures.kit import entries as naming
from labkit.figures.kit.axes import ordered, word
from labkit.figures.kit.entries import OVERSUBSCRIBED, Entry, clock_and_network, safe_text
from labkit.figures.kit.panels import Panel
from labkit.figures.runs.measures import (
    is_timed,
    parameters,
    spread,
    text_of,
    title_of,
    values_of,
)
from labkit.figures.runs.speed import refusals
from labkit.records.run import Run

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

_WIDE = 30.0  # from this ratio on an axis is logarithmic


def scatter(runs: Iterable[Run] | Run, x: str, y: str) -> Figure:
    """One number of each run over another, a marker a run; bars span the seeds.

    Args: runs: to compare; x, y: names of parameters that differ or of metrics, as in
    `lk.frame(runs)`.
    Raises: LabkitError where there are no runs; InvalidInput, a name that no run has.
    """
    from labkit.figures.kit.canvas import draw

    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    across, up = values_of(shown, x), values_of(shown, y)
    refused = refusals(shown) if is_timed(x) or is_timed(y) else ""
    panel = Panel(
        title="",
        x=title_of(x),
        y=title_of(y),
        traces=[
            _marker(entry, (x, across), (y, up), place)
            for place, entry in enumerate(shown)
            if across[place] is not None and up[place] is not None
        ],
        note=refused or f"no run has both {title_of(x)} and {title_of(y)}",
        always_note=bool(refused),
        x_axis=_axis(shown, x, across),
        y_axis=_axis(shown, y, up),
    )
    title = f"{title_of(y).capitalize()} by {title_of(x)} · {clock_and_network(shown)}"
    busy = any(entry.metrics.get("oversubscribed") for entry in shown)
    words = [
        f"{entry.label}: {title_of(y)} {text_of(y, up[place])}, {title_of(x)} "
        f"{text_of(x, across[place])}"
        for place, entry in enumerate(shown)
    ]
    remark = OVERSUBSCRIBED if busy else ""
    alt = ". ".join(part for part in [title, remark, *words, refused] if part) + "."
    return draw([[panel]], shown, title, remark, alt, plot=300)


def _marker(
    entry: Entry, x: tuple[str, list[Any]], y: tuple[str, list[Any]], place: int
) -> dict[str, Any]:
    at = [_place(values, values[place]) for _, values in (x, y)]
    said = safe_text(f"{text_of(y[0], y[1][place])}, {text_of(x[0], x[1][place])}")
    return {
        "x": [at[0]],
        "y": [at[1]],
        "mode": "markers",
        "marker": {"color": entry.color, "symbol": entry.symbol, "size": 10},
        "error_x": _bar(entry, x[0], at[0]),
        "error_y": _bar(entry, y[0], at[1]),
        "hovertemplate": said,
        "showlegend": False,
    } | entry.style


def _bar(entry: Entry, name: str, value: float) -> dict[str, Any]:
    low, high = spread(entry, name) or (value, value)
    ends = {"array": [max(high - value, 0.0)], "arrayminus": [max(value - low, 0.0)]}
    return ends | {
        "symmetric": False,
        "color": entry.color,
        "thickness": 1.5,
        "visible": high > low,
    }


def _place(values: Sequence[Any], value: Any) -> float:
    """A number stands for itself; among words, a value for its slot."""
    if _words(values):
        return float([repr(slot) for slot in ordered(values)].index(repr(value)))
    return float(value)


def _words(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str | bool) for value in values)


def _axis(shown: Sequence[Entry], name: str, values: Sequence[Any]) -> dict[str, Any]:
    if _words(values):
        slots = ordered(values)
        texts = [safe_text(word(name, slot)) for slot in slots]
        return {"tickvals": list(range(len(slots))), "ticktext": texts}
    known = [value for value in values if value is not None]
    ticks: dict[str, Any] = {"tickformat": ".1%"} if name.endswith("accuracy") else {}
    if name in parameters(shown) and len(set(known)) <= 8:
        ticks = {"tickvals": sorted(set(known))}
    wide = bool(known) and min(known) > 0 and max(known) / min(known) >= _WIDE
    return ticks | ({"type": "log"} if wide else {})
