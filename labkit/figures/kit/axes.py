"""Values of runs as places on an axis: numbers in proportion, words and few numbers in slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.common.canonical_json import is_number
from labkit.common.privacy import scrub
from labkit.figures.kit.naming import spoken
from labkit.figures.kit.panels import Trace
from labkit.records.analysis.columns import Value, ordered
from labkit.records.compressors import called

TITLES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "wire_bytes_per_step": "bytes a step",
    "train_seconds": "training, s",
    "samples_per_second": "samples/s",
    "step_ms.median": "step, ms",
    "payload_bytes_per_step": "payload, bytes a step",
}
# An axis of accuracies: of one value, or of few, Plotly would draw it down to -50 %.
SHARES = {"tickformat": ".1%", "autorangeoptions": {"clipmin": -0.02, "clipmax": 1.02}}
_ALIKE, _AROUND = 0.001, 0.05  # of accuracies: so little between them, so much shown around
_SLOTS = 8  # more distinct numbers than this are a scale
_ONE = 0.01
_WIDE = 30.0  # from this ratio of the greatest to the least on a scale is logarithmic
_LETTERS = 18  # a longer word is cut


@dataclass(frozen=True)
class Scale:
    """Where values stand between 0 and 1, and where which values are named."""

    places: tuple[float | None, ...]
    ticks: tuple[tuple[float, Value], ...]
    slots: bool = False


def shares(values: Iterable[float]) -> Trace:
    """An axis of accuracies; of equal ones, with some room around them."""
    found = [value for value in values if value == value]
    if not found or max(found) - min(found) > _ALIKE:
        return dict(SHARES)
    return {"tickformat": ".1%", "range": [min(found) - _AROUND, max(found) + _AROUND]}


def scale(values: Sequence[Value], measured: bool) -> Scale:
    """Lay out one value a run; None: the run has none, or it may not be shown.

    measured: a result, which is never put into slots.
    """
    known = [value for value in values if value is not None]
    numeric = all(is_number(value) for value in known)
    if measured or (numeric and len(set(known)) > _SLOTS):
        return _proportional(values, [float(value) for value in known])
    return _slots(values)


def word(name: str, value: Value) -> str:
    """A parameter's value for a tick."""
    if value is None:
        return called(None) if name == "compressor" else "none"
    if name == "compressor":
        return spoken(str(value), with_feedback=True)
    text = number_text(value) if is_number(value) else scrub(str(value))
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def title_of(name: str) -> str:
    """The name of a column for an axis."""
    return TITLES.get(name, name.rpartition(".")[2].replace("_", " "))


def text_of(name: str, value: Value) -> str:
    """A value for the eye: shares in per cent, other numbers in three figures, words as words."""
    if not is_number(value):
        return word(name, value)
    return f"{value:.1%}" if name.endswith("accuracy") else number_text(value)


def number_text(value: float) -> str:
    """Three figures; from 10,000 on with k, M, G."""
    size = abs(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(0.9995 * factor, 9_999.5):
            return f"{value / factor:.3g}{letter}"
    return f"{value:,.0f}" if size >= 999.5 else f"{value:.3g}"


def _proportional(values: Sequence[Value], known: list[float]) -> Scale:
    low, high = min(known, default=0.0), max(known, default=1.0)
    # Ends that nobody tells apart are one value: 5.79 M and 5.80 M bytes are the same amount.
    if high - low < _ONE * abs(high):
        middle = tuple(None if value is None else 0.5 for value in values)
        return Scale(places=middle, ticks=((0.5, known[0] if known else None),))
    # Where values differ so much, most of them would lie on one end of a scale in proportion.
    logarithmic = low > 0 and high / low >= _WIDE
    way = math.log if logarithmic else float
    span = way(high) - way(low)

    def place(value: float) -> float:
        # One value for all stands in the middle.
        return (way(value) - way(low)) / span if span else 0.5

    ends = [low, high] if span else [low]
    return Scale(
        places=tuple(None if value is None else place(float(value)) for value in values),
        ticks=tuple((place(end), end) for end in ends),
    )


def _slots(values: Sequence[Value]) -> Scale:
    slots = ordered(values)
    room = 1 / len(slots)
    keys = [repr(slot) for slot in slots]
    middle = {key: (number + 0.5) * room for number, key in enumerate(keys)}
    return Scale(
        places=tuple(middle[repr(value)] for value in values),
        ticks=tuple((middle[repr(slot)], slot) for slot in slots),
        slots=True,
    )
