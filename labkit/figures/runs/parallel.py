"""Parallel coordinates: an axis for each parameter that differs and each result, a line a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.figures.kit.axes import Scale, scale, text_of, title_of, word
from labkit.figures.kit.entries import MANY, Entry, clock_and_network, safe_text, settings
from labkit.figures.kit.marks import rule, words
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import Sheet, busy
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.columns import RESULTS, Value, measured, parameters, values_of
from labkit.records.run import Run

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

_MOST = 9  # more axes than this leave no room for their words
_BELOW, _ABOVE = -0.055, 1.055  # where the ends of an axis are named
_ACROSS = 125  # letters that fit beside each other
_SPREAD = 0.5  # share of a slot over which its runs stand side by side

Axis = tuple[str, list[Value], Scale]


def parallel_coordinates(runs: Iterable[Run] | Run, axes: Sequence[str] | None = None) -> Figure:
    """Each run as a line over its parameters and results; runs in one slot stand side by side.

    A run whose equivalence gate failed has no speed, so its line is broken there.

    Args: runs: to compare; axes: names of parameters and metrics, from left to right (by default
    the parameters that differ but for the seed, then accuracy or loss, bytes, samples/s).
    Raises: LabkitError where there are no runs; InvalidInput, a name that no run has.
    """
    return parallel_sheet(settings(runs), axes).figure()


def parallel_sheet(shown: Sequence[Entry], axes: Sequence[str] | None = None) -> Sheet:
    """The same, of entries."""
    chosen = _axes(shown, axes)
    panel = Panel(
        title="",
        x="",
        y="",
        traces=[*_lines(shown, chosen), _rules(len(chosen)), _ticks(chosen)],
        note=refusals(shown),
        always_note=bool(refusals(shown)),
        x_axis=_names(chosen),
        y_axis={"visible": False, "range": [-0.1, 1.1], "fixedrange": True},
    )
    title = f"Parameters and results · {clock_and_network(shown)}"
    said = [_in_words(entry, chosen, place) for place, entry in enumerate(shown)]
    said.append(refusals(shown))
    return Sheet([[panel]], shown, title, busy(shown), said, plot=300, below=24)


def _axes(shown: Sequence[Entry], names: Sequence[str] | None) -> list[Axis]:
    runs = [entry.run for entry in shown]
    given = parameters(runs)
    if names is None:
        # Chance and a label explain no result.
        names = [name for name in given if name not in ("seed", "name")][: _MOST - len(RESULTS)]
        # A result that is the same for all tells nobody from anybody.
        names += [name for name in RESULTS if len(set(measured(runs, name))) > 1]
    chosen = list(names) or list(given) or [RESULTS[0]]
    columns = [(name, values_of(runs, name, given)) for name in chosen]
    return [(name, values, scale(values, name not in given)) for name, values in columns]


def _lines(shown: Sequence[Entry], axes: Sequence[Axis]) -> list[Trace]:
    beside = [_side_by_side(each) for _, _, each in axes]
    few = len(shown) <= MANY
    return [
        {
            "x": list(range(len(axes))),
            "y": [None if (y := column[place]) is None else round(y, 4) for column in beside],
            "mode": "lines+markers" if few else "lines",
            "line": {"color": entry.color, "dash": entry.dash, "width": 2 if few else 1.5},
            "marker": {"color": entry.color, "symbol": entry.symbol, "size": 7} if few else None,
            "text": [_said(axis, place) for axis in axes],
            "hovertemplate": "%{text}",
            "showlegend": False,
        }
        | entry.style
        for place, entry in enumerate(shown)
    ]


def _side_by_side(each: Scale) -> list[float | None]:
    """Places where runs of the same slot do not cover each other."""
    if not each.slots:
        return list(each.places)
    # Half of a slot stays free, or runs of neighbouring slots could not be told apart.
    room = _SPREAD / len(each.ticks)
    members: dict[float | None, list[int]] = {}
    for place, value in enumerate(each.places):
        members.setdefault(value, []).append(place)
    spread = list(each.places)
    for value, own in members.items():
        for number, place in enumerate(own):
            if value is not None and len(own) > 1:
                spread[place] = value + room * (number / (len(own) - 1) - 0.5)
    return spread


def _rules(count: int) -> Trace:
    """The axes themselves, as one trace."""
    return rule([x for place in range(count) for x in (place, place, None)], [0, 1, None] * count)


def _ticks(axes: Sequence[Axis]) -> Trace:
    """Words above their slot's lines; numbers at the ends of their axis."""
    import pandas as pd

    room = _ACROSS // len(axes) + 1  # letters, up to the words of the next axis
    rows = [
        (place, y, safe_text(text), f"middle {side}")
        for place, (name, _, on) in enumerate(axes)
        for y, text, side in (
            _slot_words(name, on, room if place else 0) if on.slots else _ends(name, on)
        )
    ]
    table = pd.DataFrame(rows, columns=["x", "y", "text", "side"])
    drawn = words(table, "x", "y")
    return drawn | {"textposition": list(table["side"]), "cliponaxis": False}


def _slot_words(name: str, on: Scale, room: int) -> list[tuple[float, str, str]]:
    """Left of the first axis is room; elsewhere lines pass, and fewest above those of a slot."""
    up, side = ((0.5 + _SPREAD / 2) / 2 / len(on.ticks), "right") if room else (0.0, "left")
    gap = "\N{NO-BREAK SPACE}" * 2
    said = [(at + up, word(name, value)) for at, value in on.ticks]
    cut = [(y, f"{w[: room - 1]}…" if 0 < room < len(w) else w) for y, w in said]
    return [(y, f"{gap}{text}{gap}", side) for y, text in cut]


def _ends(name: str, on: Scale) -> list[tuple[float, str, str]]:
    # One value for all is named once, above.
    ends = [on.ticks[0], on.ticks[-1]] if len(on.ticks) > 1 else [(1.0, on.ticks[0][1])]
    return [(_BELOW if at == 0 else _ABOVE, text_of(name, value), "center") for at, value in ends]


def _names(axes: Sequence[Axis]) -> Trace:
    return {
        "tickvals": list(range(len(axes))),
        "ticktext": [safe_text(title_of(name)) for name, _, _ in axes],
        "side": "top",
        "showgrid": False,
        "showline": False,
        "tickangle": 0,
        "range": [-_room(axes), len(axes) - 1 + 0.035 * len(axes)],
        "fixedrange": True,
    }


def _room(axes: Sequence[Axis]) -> float:
    """Left of the first axis, for its words; in distances of axes."""
    name, _, on = axes[0]
    letters = max(len(word(name, value)) for _, value in on.ticks) + 2 if on.slots else 0
    return max(0.035, letters / _ACROSS) * len(axes)


def _said(axis: Axis, place: int) -> str:
    name, values, _ = axis
    return safe_text(f"{title_of(name)}: {text_of(name, values[place])}")


def _in_words(entry: Entry, axes: Sequence[Axis], place: int) -> str:
    said = [_said(axis, place) for axis in axes if axis[1][place] is not None]
    return f"{entry.label}: {', '.join(said)}"
