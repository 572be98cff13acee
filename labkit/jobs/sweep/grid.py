"""The combinations of a sweep: what each parameter takes, and every one of a grid or some of it."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput
from labkit.jobs.parameters import value_of

LARGEST = 10_000  # members of a sweep, and so values of one parameter
_CALL = re.compile(r"\s*(range|uniform|loguniform)\s*\((.*)\)\s*", re.DOTALL)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Draw:
    """Numbers between two bounds, drawn evenly, or with `log` evenly over orders of magnitude."""

    low: float
    high: float
    log: bool = False

    def sample(self, generator: random.Random) -> float:
        """One number, of four figures: folder names stay short, and hold the very value."""
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        return self.rounded(value)

    def rounded(self, value: float) -> float:
        """A number between the bounds in four figures."""
        # Rounding may step over a bound.
        return min(max(float(f"{value:.4g}"), self.low), self.high)


# One parameter's values in a sweep, or what to draw them from.
Axis: TypeAlias = "tuple[JSON, ...] | Draw"
Combination: TypeAlias = "dict[str, JSON]"


def from_text(name: str, text: str) -> Axis:
    """The values of `name=a,b,c`: items between commas, `range(1,5)` as in Python, or one Draw.

    Commas within brackets or quotes do not divide. Items are read by the notebook's declaration
    later, so that `1e-3` is a number where a number is declared.

    Raises:
        InvalidInput: no values, brackets that do not match, a range of nothing.
    """
    values: list[JSON] = []
    items = _split(name, text)
    for item in items:
        axis = _call(name, item)
        if isinstance(axis, Draw):
            if len(items) > 1:
                raise InvalidInput(f"{name}={text} mixes {item} with other values; give it alone")
            return axis
        if not item:
            raise InvalidInput(f"{name}={text} has no value at a comma; '' is the empty text")
        values += axis if axis is not None else [_unquoted(item)]
    return tuple(values)


def from_yaml(name: str, value: JSON) -> Axis:
    """The values of an entry of a sweep file: a list's items, a text's range or Draw, or one value.

    Raises:
        InvalidInput: an empty list, a range of nothing.
    """
    if isinstance(value, list):
        if not value:
            raise InvalidInput(f"{name} has an empty list: give it a value, or leave it out")
        return tuple(value)
    axis = _call(name, value) if isinstance(value, str) else None
    return (value,) if axis is None else axis


def every(axes: Mapping[str, Axis]) -> list[Combination]:
    """All combinations, the last parameter changing fastest.

    Raises:
        InvalidInput: more than LARGEST, or a distribution, which has no "every".
    """
    lists: dict[str, tuple[JSON, ...]] = {}
    for name, axis in axes.items():
        if isinstance(axis, Draw):
            raise InvalidInput(
                f"{name} is drawn from a distribution: say how many draws with --random N"
            )
        lists[name] = axis
    count = math.prod(map(len, lists.values()))
    if count > LARGEST:
        raise InvalidInput(
            f"{count:,} combinations are more than a sweep takes ({LARGEST:,}); "
            "leave out values, or try some of them with --random N"
        )
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def some(axes: Mapping[str, Axis], count: int, seed: int) -> list[Combination]:
    """Draw so many combinations at random, none twice; the same seed gives the same ones.

    Raises:
        InvalidInput: a count below 1, or above the number of combinations that there are.
    """
    if not 1 <= count <= LARGEST:
        raise InvalidInput(f"--random {count} is impossible; allowed: 1 to {LARGEST:,}")
    drawn = any(isinstance(axis, Draw) for axis in axes.values())
    there = math.prod(len(axis) for axis in axes.values() if not isinstance(axis, Draw))
    if count > there and not drawn:
        raise InvalidInput(
            f"--random {count} asks for more than the {there:,} combinations that there are"
        )
    generator = random.Random(seed)
    if not drawn and there <= LARGEST:
        # Drawn by place in the whole grid, and sorted: members follow each other as they do in a
        # full sweep.
        grid = every(axes)
        return [grid[place] for place in sorted(generator.sample(range(there), count))]
    found: dict[str, Combination] = {}
    # A bound on tries: distributions over few values may not have as many different ones.
    for _ in range(100 * count):
        one = {name: _pick(axis, generator) for name, axis in axes.items()}
        # By its text: lists and mappings among the values have no hash.
        found.setdefault(repr(one), one)
        if len(found) == count:
            return list(found.values())
    raise InvalidInput(
        f"--random {count}: the distributions give {len(found)} different combinations; "
        "ask for fewer, or widen them"
    )


def _call(name: str, text: str) -> Axis | None:
    """What `range(…)`, `uniform(…)` or `loguniform(…)` stands for; None for any other text."""
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    kind, arguments = match[1], [value_of(part.strip()) for part in match[2].split(",")]
    if kind == "range":
        return _range(name, text, arguments)
    # Padded, so that too few arguments are refused by the same sentence as wrong ones.
    low, high, *rest = [*arguments, None, None][: max(len(arguments), 2)]  # those absent: None
    # Between infinities nothing can be drawn; of NaN every comparison is false.
    if rest or not (is_number(low) and is_number(high) and -math.inf < low < high < math.inf):
        raise InvalidInput(f"{name}={text}: {kind} takes two numbers, the lower one first")
    if kind == "loguniform" and low <= 0:
        raise InvalidInput(f"{name}={text}: loguniform takes numbers above 0")
    return Draw(float(low), float(high), log=kind == "loguniform")


def _range(name: str, text: str, arguments: list[JSON]) -> tuple[int, ...]:
    whole = [number for number in arguments if type(number) is int]
    if len(arguments) > 3 or len(whole) < len(arguments):
        raise InvalidInput(
            f"{name}={text}: range takes one to three whole numbers, as in Python: "
            "range(1,5) is 1, 2, 3, 4"
        )
    if whole[2:] == [0]:
        raise InvalidInput(f"{name}={text}: a step of 0 never arrives")
    numbers = range(*whole)
    if not numbers:
        raise InvalidInput(f"{name}={text} is empty: range(1,5) is 1, 2, 3, 4")
    # Not len(), which has no number for what does not fit a machine word.
    if abs(numbers[-1] - numbers[0]) // abs(numbers.step) >= LARGEST:
        raise InvalidInput(f"{name}={text} has more than {LARGEST:,} values")
    return tuple(numbers)


def _split(name: str, text: str) -> list[str]:
    """Divide at the commas that stand outside of brackets and quotes."""
    items, start, expected, quote = [], 0, [""], ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (len(expected) > 1 or not text[start:place].strip()):
            quote = letter  # an apostrophe within a word is a letter
        elif letter in _CLOSING:
            expected.append(_CLOSING[letter])
        elif letter == expected[-1]:
            expected.pop()
        elif letter == "," and len(expected) == 1:
            items.append(text[start:place])
            start = place + 1
    if quote or len(expected) > 1:
        raise InvalidInput(f"{name}={text} lacks a closing {quote or expected[-1]}")
    return [item.strip() for item in [*items, text[start:]]]


def _unquoted(item: str) -> str:
    quoted = len(item) > 1 and item[0] == item[-1] and item[0] in "'\""
    return item[1:-1] if quoted else item


def _pick(axis: Axis, generator: random.Random) -> JSON:
    return axis.sample(generator) if isinstance(axis, Draw) else generator.choice(axis)
