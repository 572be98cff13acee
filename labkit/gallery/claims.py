"""Check whether the conclusions in a summary's sentences follow from the quoted numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from labkit.gallery.evidence import numbers

# The pattern `_N` matches a number with its unit. The function `numbers` converts each unit to its
# base unit, so that values in ms and s are comparable.
_UNIT = r" ?(?:%|x|×|µs|[mn]?s|[KMG]?i?B|samples/s)"
_N = rf"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:{_UNIT})?(?![\w])"
_SPREAD = rf"(?:spread |repeats |p10 to p90 |\d+ seeds, )?({_N}) to ({_N})\)"


class Claim(NamedTuple):
    """A rule for sentences: a pattern, and a condition on the numbers that it captures.

    Attributes:
        form: Pattern of a sentence with a conclusion; its groups capture numbers.
        holds: Function of the captured numbers that returns whether the conclusion holds.
        words: Description of the condition, for error messages.
    """

    form: re.Pattern[str]
    holds: Callable[..., bool]
    words: str


def _rule(form: str, holds: Callable[..., bool], words: str) -> Claim:
    return Claim(re.compile(form), holds, words)


# The conditions include equality, because a quoted 1.00 is rounded, and its true value may be
# slightly above or below 1.
RULES = (
    _rule(
        rf"({_N})[^.;:()\d]{{0,40}} \({_SPREAD}",
        lambda a, b, c: b <= a <= c,
        "the value must lie within its range",
    ),
    _rule(
        rf"\({_SPREAD}[^:.()]*: it pays",
        lambda a, b: a >= 1,
        "'it pays' requires that the whole range is above 1",
    ),
    _rule(
        rf"\({_SPREAD}[^:()]*: it does not pay",
        lambda a, b: b <= 1,
        "'it does not pay' requires that the whole range is below 1",
    ),
    _rule(
        rf"\({_SPREAD}[^:()]*: no difference",
        lambda a, b: a <= 1 <= b,
        "'no difference' requires that the range includes 1",
    ),
    _rule(
        rf"\({_SPREAD}: faster",
        lambda a, b: b <= 1,
        "'faster' requires that the whole range of time ratios is below 1",
    ),
    _rule(
        rf"\({_SPREAD}: slower",
        lambda a, b: a >= 1,
        "'slower' requires that the whole range of time ratios is above 1",
    ),
    _rule(
        r"(?<![\d.,])(\d+) of (\d+)\b", lambda a, b: a <= b, "the part must not exceed the total"
    ),
    _rule(
        rf"({_N}) times the fastest", lambda a: a >= 1, "no time can be shorter than the fastest"
    ),
    _rule(
        rf"shortest step[^(]*\*\*[^(]*\(({_N})\), the longest[^(]*\(({_N})\)",
        lambda a, b: a <= b,
        "the shortest step must not be longer than another step",
    ),
    _rule(
        rf"shortest step is that of .*?\*\*, ({_N}) \(.*?the next ({_N})",
        lambda a, b: a <= b,
        "the shortest step must not be longer than another step",
    ),
    _rule(
        rf"still grows: .*? ({_N}) in the last .*?, ({_N}) in",
        lambda a, b: a >= b,
        "a growing norm must be larger at the end",
    ),
    _rule(
        rf"More servers .*: reproduced: .*: ({_N})",
        lambda a: a >= 1,
        "more servers must serve more samples/s",
    ),
    _rule(
        rf"More servers .*: \*\*not\*\* reproduced: .*: ({_N})",
        lambda a: a <= 1,
        "more servers must not serve more samples/s",
    ),
    _rule(
        rf"backup worker .*: reproduced: .*?: ({_N})",
        lambda a: a <= 1,
        "the step must be shorter with a backup worker",
    ),
    _rule(
        rf"backup worker .*: \*\*not\*\* reproduced: .*?: ({_N})",
        lambda a: a >= 1,
        "the step must not be shorter with a backup worker",
    ),
)
# Each claim of a minimum is checked against the values in the other lines of the summary; for each
# claim, a pattern finds the values.
LEAST = {
    "least memory on a rank": rf"keeps ({_N})",
    "shortest step": rf"a step takes ({_N})",
    "least traffic of the runs that send": rf"sends ({_N})",
}
_NOTHING = re.compile(r"(?<![\w.])(?:nan|inf|NaN|None|NaT)(?![\w.])")


def contradictions(reading: str) -> Iterator[str]:
    """Yield a description of each conclusion that contradicts the numbers in its sentence."""
    for line in reading.splitlines():
        if match := _NOTHING.search(line):
            yield f"{match[0]!r} is not a result: {line}"
        for rule in RULES:
            for match in rule.form.finditer(line):
                if not rule.holds(*map(_value, match.groups())):
                    yield f"{match[0]!r}: {rule.words}"
    yield from _extremes(reading)


def _extremes(reading: str) -> Iterator[str]:
    for words, form in LEAST.items():
        named = re.search(rf"(?i){words}: \*\*(.+?)\*\*", reading)
        lines = re.finditer(rf"(?m)^- \*\*(.+?)\*\*: .*?{form}", reading)
        values = {line[1]: _value(line[2]) for line in lines}
        values = {name: value for name, value in values.items() if value or "traffic" not in words}
        if named and values and values.get(named[1], -1) != min(values.values()):
            yield f"{named[0]!r}: the minimum is {min(values, key=lambda name: values[name])}"


def _value(text: str) -> float:
    """Return a quoted number in base units; for invalid text, NaN, which satisfies no rule."""
    number = next(numbers(text.lstrip("-")), None)
    value = math.nan if number is None else number.value
    return -value if text.startswith("-") else value
