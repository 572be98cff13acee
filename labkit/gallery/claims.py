"""What the sentences of a reading conclude, held against the numbers that stand in them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from labkit.gallery.evidence import numbers

# A number with its unit; what it is worth is read by `numbers`, so that ms may stand beside s.
_UNIT = r" ?(?:%|x|×|µs|[mn]?s|[KMG]?i?B|samples/s)"
_N = rf"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:{_UNIT})?(?![\w])"
_SPREAD = rf"(?:spread |repeats |p10 to p90 |\d+ seeds, )?({_N}) to ({_N})\)"


class Claim(NamedTuple):
    """Where its form is found in a line, its numbers have to be so."""

    form: re.Pattern[str]
    holds: Callable[..., bool]
    words: str


def _law(form: str, holds: Callable[..., bool], words: str) -> Claim:
    return Claim(re.compile(form), holds, words)


# Numbers are rounded: what reads 1.00 may be a little more or less.
LAWS = (
    _law(rf"({_N})[^.;:()\d]{{0,40}} \({_SPREAD}", lambda a, b, c: b <= a <= c, "within its ends"),
    _law(
        rf"\({_SPREAD}[^:.()]*: it pays", lambda a, b: a >= 1, "pays only if all of it is above 1"
    ),
    _law(
        rf"\({_SPREAD}[^:()]*: it (?:costs more|does not pay)",
        lambda a, b: b <= 1,
        "costs only if all of it is below 1",
    ),
    _law(
        rf"\({_SPREAD}[^:()]*: no difference", lambda a, b: a <= 1 <= b, "none only if 1 lies in it"
    ),
    _law(rf"\({_SPREAD}: faster", lambda a, b: b <= 1, "faster only if all of it is below 1"),
    _law(rf"\({_SPREAD}: slower", lambda a, b: a >= 1, "slower only if all of it is above 1"),
    _law(r"(?<![\d.,])(\d+) of (\d+)\b", lambda a, b: a <= b, "no more than there are"),
    _law(rf"({_N}) times the fastest", lambda a: a >= 1, "none is faster than the fastest"),
    _law(
        rf"shortest step[^(]*\*\*[^(]*\(({_N})\), the longest[^(]*\(({_N})\)",
        lambda a, b: a <= b,
        "the shortest is no longer",
    ),
    _law(
        rf"shortest step is that of .*?\*\*, ({_N}) \(.*?the next ({_N})",
        lambda a, b: a <= b,
        "the shortest is no longer",
    ),
    _law(
        rf"still grows: .*? ({_N}) in the last .*?, ({_N}) in",
        lambda a, b: a >= b,
        "what grows is more at the end",
    ),
    _law(rf"More servers .* it came: .*: ({_N})", lambda a: a >= 1, "they serve more"),
    _law(
        rf"More servers .* it did \*\*not\*\* come: .*: ({_N})",
        lambda a: a <= 1,
        "they serve no more",
    ),
    _law(rf"backup worker .* it came: .*?: ({_N})", lambda a: a <= 1, "the step is shorter"),
    _law(
        rf"backup worker .* it did \*\*not\*\* come: .*?: ({_N})",
        lambda a: a >= 1,
        "the step is no shorter",
    ),
)
# What a line says is the least of all lines of its reading.
LEAST = {
    "least memory on a rank": rf"keeps ({_N})",
    "shortest step": rf"a step takes ({_N})",
    "least traffic of those that send": rf"hands over ({_N})",
}
_NOTHING = re.compile(r"(?<![\w.])(?:nan|inf|NaN|None|NaT)(?![\w.])")


def broken(reading: str) -> Iterator[str]:
    """What of a reading does not follow from its numbers, a line each."""
    for line in reading.splitlines():
        if found := _NOTHING.search(line):
            yield f"{found[0]!r} is no result: {line}"
        for law in LAWS:
            for match in law.form.finditer(line):
                if not law.holds(*map(_value, match.groups())):
                    yield f"{match[0]!r}: {law.words}"
    yield from _extremes(reading)


def _extremes(reading: str) -> Iterator[str]:
    for words, form in LEAST.items():
        named = re.search(rf"(?i){words}: \*\*(.+?)\*\*", reading)
        lines = re.finditer(rf"(?m)^- \*\*(.+?)\*\*: .*?{form}", reading)
        values = {line[1]: _value(line[2]) for line in lines}
        values = {name: value for name, value in values.items() if value or "traffic" not in words}
        if named and values and values.get(named[1], -1) != min(values.values()):
            yield f"{named[0]!r}: it is {min(values, key=lambda name: values[name])}"


def _value(text: str) -> float:
    """What a number is worth; one that cannot be read keeps no law."""
    found = next(numbers(text.lstrip("-")), None)
    value = math.nan if found is None else found.value
    return -value if text.startswith("-") else value
