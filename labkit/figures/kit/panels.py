"""Panels as data: the traces, axes and texts of one chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common.canonical_json import is_number
from labkit.common.privacy import scrub
from labkit.figures.kit.entries import compressor_text
from labkit.records.analysis.columns import Value, sorted_values
from labkit.records.compressors import compressor_expression

if TYPE_CHECKING:
    pass


# A `Trace` is a Plotly dictionary that describes a trace, an axis or a layout. Plotly's schema
# validates a `Trace` when the figure is drawn.
Trace: TypeAlias = dict[str, Any]

# The constant `PLOT` is the height of a panel's axes in pixels. The constant `BELOW` is the height
# in pixels of the labels below the axes.
PLOT, BELOW = 200, 50


@dataclass(frozen=True)
class Panel:
    """The traces, axes and texts of one chart in a figure.

    Attributes:
        title: Title; the first line is bold.
        x, y: Axis titles with units.
        traces: Plotly traces without names of axes.
        note: Text in the middle of a panel without traces. If `always_note` is true, a panel with
            traces shows the text below its axis.
        always_note: Whether the note is also shown in a panel that has traces.
        x_axis, y_axis: Further Plotly settings of the axes.
        link: Key of the group of panels that zoom together. If the user zooms the x axis of one
            panel, the x axes of the group follow.
        over: Alternative x axes, with one entry per name. The `meta` of a trace contains its
            positions on these axes.
    """

    title: str
    x: str
    y: str
    traces: list[Trace]
    note: str = ""
    always_note: bool = False
    x_axis: Trace = field(default_factory=dict)
    y_axis: Trace = field(default_factory=dict)
    link: str = ""
    over: dict[str, Trace] = field(default_factory=dict)


def lanes_axis(lanes: Sequence[str]) -> Trace:
    """Return a y axis with a lane for each name, from top to bottom."""
    return {
        "type": "category",
        "categoryorder": "array",
        # The order of the lanes is reversed, because Plotly orders categories from bottom to top.
        "categoryarray": list(lanes[::-1]),
        "range": [-0.5, len(lanes) - 0.5],
        "showgrid": False,
        "nticks": len(lanes),
    }


TITLES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "wire_bytes_per_step": "bytes per step on the wire",
    "train_seconds": "training time, s",
    "samples_per_second": "samples/s",
    "step_ms.median": "step time, ms",
    "payload_bytes_per_step": "bytes of payload per step",
}
# The axis range is limited, because Plotly would extend an axis with few accuracies down to -50 %.
SHARES = {"tickformat": ".1%", "autorangeoptions": {"clipmin": -0.02, "clipmax": 1.02}}
# Accuracies count as equal within the range `_ALIKE`; `_AROUND` is the margin of an axis around
# equal accuracies.
_ALIKE, _AROUND = 0.001, 0.05
_SLOTS = 8  # At most this number of distinct numbers is placed at equal distances on an axis.
_ONE = 0.01  # relative difference below which the ends of a scale count as equal
# A scale is logarithmic if its greatest value is at least this multiple of its least value.
_WIDE = 30.0
_LETTERS = 18  # maximum length of a tick text in letters


@dataclass(frozen=True)
class AxisScale:
    """Positions of values on an axis, from 0 to 1, and the labelled ticks."""

    places: tuple[float | None, ...]
    ticks: tuple[tuple[float, Value], ...]
    slots: bool = False


def shares(values: Iterable[float]) -> Trace:
    """Return an axis for accuracies, with a margin on both sides if all accuracies are equal."""
    numbers = [value for value in values if value == value]
    if not numbers or max(numbers) - min(numbers) > _ALIKE:
        return dict(SHARES)
    return {"tickformat": ".1%", "range": [min(numbers) - _AROUND, max(numbers) + _AROUND]}


def counts_axis(counts: Iterable[float]) -> Trace:
    """Return a logarithmic axis with a tick at each count."""
    ticks = sorted(set(counts))
    return {"type": "log", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}


def names_axis(names: Sequence[str]) -> Trace:
    """Return an x axis with a name below each bar."""
    ticks: Trace = {"tickvals": list(range(len(names))), "ticktext": list(names)}
    return ticks | {"range": [-0.6, max(len(names), 1) - 0.4], "showgrid": False, "tickangle": 0}


def scale(values: Sequence[Value], measured: bool) -> AxisScale:
    """Return one axis position for each run's value, and the ticks of the axis.

    Args:
        values: The value of each run, or None if a run has no value. None also stands for a value
            that the figure must hide.
        measured: Whether the values are results of runs. Results are placed to scale, but parameter
            values may be placed at equal distances.
    """
    known = [value for value in values if value is not None]
    numeric = all(is_number(value) for value in known)
    if measured or (numeric and len(set(known)) > _SLOTS):
        return _proportional(values, [float(value) for value in known])
    return _slots(values)


def word(name: str, value: Value) -> str:
    """Return the tick text of a parameter's value."""
    if value is None:
        return compressor_expression(None) if name == "compressor" else "none"
    if name == "compressor":
        return compressor_text(str(value), with_feedback=True)
    text = number_text(value) if is_number(value) else scrub(str(value))
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def title_of(name: str) -> str:
    """Return the axis title of a parameter or metric."""
    return TITLES.get(name, name.rpartition(".")[2].replace("_", " "))


def text_of(name: str, value: Value) -> str:
    """Return a value as text: accuracies in percent, other numbers with three digits."""
    if not is_number(value):
        return word(name, value)
    return f"{value:.1%}" if name.endswith("accuracy") else number_text(value)


def number_text(value: float) -> str:
    """Return a number with three digits; from 10,000 on, with the suffix k, M or G."""
    size = abs(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(0.9995 * factor, 9_999.5):
            return f"{value / factor:.3g}{letter}"
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def _proportional(values: Sequence[Value], known: list[float]) -> AxisScale:
    low, high = min(known, default=0.0), max(known, default=1.0)
    # Least and greatest values count as equal if they differ by less than 1 %. For example, 5.79 M
    # and 5.80 M bytes count as equal.
    if high - low < _ONE * abs(high):
        middle = tuple(None if value is None else 0.5 for value in values)
        return AxisScale(places=middle, ticks=((0.5, known[0] if known else None),))
    # A wide range of values needs a logarithmic scale. On a linear scale, most values would be
    # close to one end.
    logarithmic = low > 0 and high / low >= _WIDE
    transform = math.log if logarithmic else float
    span = transform(high) - transform(low)

    def place(value: float) -> float:
        # If all values are 0, their position is the middle of the axis.
        return (transform(value) - transform(low)) / span if span else 0.5

    ends = [low, high] if span else [low]
    return AxisScale(
        places=tuple(None if value is None else place(float(value)) for value in values),
        ticks=tuple((place(end), end) for end in ends),
    )


def _slots(values: Sequence[Value]) -> AxisScale:
    slots = sorted_values(values)
    room = 1 / len(slots)
    keys = [repr(slot) for slot in slots]
    middle = {key: (number + 0.5) * room for number, key in enumerate(keys)}
    return AxisScale(
        places=tuple(middle[repr(value)] for value in values),
        ticks=tuple((middle[repr(slot)], slot) for slot in slots),
        slots=True,
    )
