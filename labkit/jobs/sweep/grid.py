"""The parameter combinations of a sweep: a full grid of all values, or a random sample."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput
from labkit.jobs.parameters import value_of

# A sweep has at most LARGEST notebook runs. One parameter has at most LARGEST values.
LARGEST = 10_000
_CALL = re.compile(r"\s*(range|uniform|loguniform)\s*\((.*)\)\s*", re.DOTALL)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Draw:
    """A distribution between two bounds: uniform, or uniform in the logarithm if `log` is True."""

    low: float
    high: float
    log: bool = False

    def sample(self, generator: random.Random) -> float:
        """Draw a number with four significant digits, so that a folder name shows it exactly."""
        if self.log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        return self.rounded(value)

    def rounded(self, value: float) -> float:
        """Round a number to four significant digits, within the bounds."""
        # Rounding to four digits can move a number beyond a bound. The calls of `min` and `max`
        # keep the rounded number within the bounds.
        return min(max(float(f"{value:.4g}"), self.low), self.high)


# The type `Axis` contains the values of one swept parameter. Instead of values, an `Axis` may be a
# distribution for random draws.
Axis: TypeAlias = "tuple[JSON, ...] | Draw"
Combination: TypeAlias = "dict[str, JSON]"


def from_text(name: str, text: str) -> Axis:
    """Return the values listed in a text such as `1,2,range(4,9)`, or the distribution it names.

    Commas inside brackets or quotes do not separate items. Items stay texts until they are
    converted to the declared type of the parameter. For example, `1e-3` becomes a number only if
    the parameter is declared as a number.

    Raises:
        InvalidInput: A value is missing, brackets do not match, or a range is empty.
    """
    values: list[JSON] = []
    items = split(name, text)
    for item in items:
        axis = _call(name, item)
        if isinstance(axis, Draw):
            if len(items) > 1:
                raise InvalidInput(
                    f"{name}={text} mixes {item} with other values; give {item} alone"
                )
            return axis
        if not item:
            raise InvalidInput(f"{name}={text} has an empty item; write '' for an empty text")
        values += axis if axis is not None else [unquoted(item)]
    return tuple(values)


def from_yaml(name: str, value: JSON) -> Axis:
    """Return the values, or the distribution, of a parameter's entry in a sweep file.

    Raises:
        InvalidInput: A list or a range is empty.
    """
    if isinstance(value, list):
        if not value:
            raise InvalidInput(f"the list of {name} is empty; give it a value, or remove {name}")
        return tuple(value)
    axis = _call(name, value) if isinstance(value, str) else None
    return (value,) if axis is None else axis


def zip_axes(axes: Mapping[str, Axis], groups: Sequence[Sequence[str]]) -> dict[str, Axis]:
    """Replace the axes of each group of zipped parameters by one axis, such as `a,b`.

    The values of a zipped axis are lists with one value of each parameter, as from Python's `zip`.

    >>> zip_axes({"a": (1, 2), "b": (3, 4)}, [["a", "b"]])
    {'a,b': ([1, 3], [2, 4])}

    Raises:
        InvalidInput: A group has fewer than two parameters. A parameter without listed values, a
            parameter in two groups, and unequal numbers of values also raise InvalidInput.
    """
    names = [name for group in groups for name in group]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(f"--zip names {twice} twice; name each parameter in one group, once")
    zipped = {name: (",".join(group), _zip(axes, group)) for group in groups for name in group}
    return dict(zipped.get(name, (name, axis)) for name, axis in axes.items())


def _zip(axes: Mapping[str, Axis], group: Sequence[str]) -> Axis:
    option = f"--zip {','.join(group)}"
    if len(group) < 2:
        raise InvalidInput(f"{option} names one parameter; name at least two, such as --zip a,b")
    lists: dict[str, tuple[JSON, ...]] = {}
    for name in group:
        axis = axes.get(name)
        if not isinstance(axis, tuple):
            state = "is not swept" if axis is None else "is drawn from a distribution"
            raise InvalidInput(f"{option}: {name} {state}; list its values, such as {name}=1,2,3")
        lists[name] = axis
    if len(set(map(len, lists.values()))) > 1:
        counts = ", ".join(f"{name} has {len(values)}" for name, values in lists.items())
        raise InvalidInput(
            f"{option}: {counts} values; give all zipped parameters the same number of values"
        )
    return tuple(list(values) for values in zip(*lists.values(), strict=True))


def unzip(combination: Combination) -> Combination:
    """Return a combination in which each zipped parameter has its own entry.

    >>> unzip({"a,b": [1, 3], "c": 5})
    {'a': 1, 'b': 3, 'c': 5}
    """
    values: Combination = {}
    for name, value in combination.items():
        names = name.split(",")
        if len(names) > 1 and isinstance(value, list):
            values |= zip(names, value, strict=True)
        else:
            values[name] = value
    return values


def all_combinations(axes: Mapping[str, Axis]) -> list[Combination]:
    """Return all combinations of values, in which the last parameter changes fastest.

    Raises:
        InvalidInput: There are more than LARGEST combinations, or a parameter has a distribution. A
            parameter with a distribution has no full grid.
    """
    lists: dict[str, tuple[JSON, ...]] = {}
    for name, axis in axes.items():
        if isinstance(axis, Draw):
            raise InvalidInput(
                f"{name} is drawn from a distribution; give the number of draws with --random N"
            )
        lists[name] = axis
    count = math.prod(map(len, lists.values()))
    if count > LARGEST:
        raise InvalidInput(
            f"{count:,} combinations exceed the maximum of a sweep ({LARGEST:,}); "
            "remove values, or draw some combinations with --random N"
        )
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def random_combinations(axes: Mapping[str, Axis], count: int, seed: int) -> list[Combination]:
    """Draw distinct combinations at random; the same seed gives the same combinations.

    Raises:
        InvalidInput: The count is below 1, or above the number of possible combinations.
    """
    if not 1 <= count <= LARGEST:
        raise InvalidInput(f"--random {count} is impossible; allowed: 1 to {LARGEST:,}")
    has_draws = any(isinstance(axis, Draw) for axis in axes.values())
    grid_size = math.prod(len(axis) for axis in axes.values() if not isinstance(axis, Draw))
    if count > grid_size and not has_draws:
        raise InvalidInput(
            f"--random {count} exceeds the {grid_size:,} combinations of the values; give fewer"
        )
    generator = random.Random(seed)
    if not has_draws and grid_size <= LARGEST:
        # The code sorts the drawn indices. The notebook runs then have the same order as in the
        # full grid.
        grid = all_combinations(axes)
        return [grid[place] for place in sorted(generator.sample(range(grid_size), count))]
    combinations: dict[str, Combination] = {}
    # A distribution of rounded numbers may have too few distinct values. The number of draws is
    # therefore limited.
    for _ in range(100 * count):
        combination = {name: _pick(axis, generator) for name, axis in axes.items()}
        # Combinations of parameter values are stored by their text, because lists and mappings
        # cannot be dictionary keys.
        combinations.setdefault(repr(combination), combination)
        if len(combinations) == count:
            return list(combinations.values())
    raise InvalidInput(
        f"--random {count}: the distributions give only {len(combinations)} different "
        "combinations; give a smaller number, or wider distributions"
    )


def _call(name: str, text: str) -> Axis | None:
    """Return the values of `range(…)`, `uniform(…)` or `loguniform(…)`; None for other text."""
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    kind, arguments = match[1], [value_of(part.strip()) for part in match[2].split(",")]
    if kind == "range":
        return _range(name, text, arguments)
    # A missing argument becomes None, so that it raises the same error as a wrong argument.
    low, high, *rest = [*arguments, None, None][: max(len(arguments), 2)]  # None: missing

    # Infinite bounds are rejected, because no number can be drawn between them. NaN is rejected,
    # because comparisons with NaN are always false.
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
        raise InvalidInput(f"{name}={text}: the step of a range must not be 0")
    numbers = range(*whole)
    if not numbers:
        raise InvalidInput(f"{name}={text} has no values; range(1,5), for example, is 1, 2, 3, 4")
    # If the range is longer than a machine word allows, `len` raises an OverflowError. The code
    # therefore computes the length of the range itself.
    if abs(numbers[-1] - numbers[0]) // abs(numbers.step) >= LARGEST:
        raise InvalidInput(f"{name}={text} has more than {LARGEST:,} values")
    return tuple(numbers)


def split(name: str, text: str) -> list[str]:
    """Split a text at its commas, except commas in brackets and quotes."""
    items, start, expected, quote = [], 0, [""], ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (len(expected) > 1 or not text[start:place].strip()):
            # Outside brackets, a quotation mark inside an item counts as an apostrophe. Outside
            # brackets, a string begins only at the start of an item.
            quote = letter
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


def unquoted(item: str) -> str:
    """Return an item without its quotation marks, if it has any."""
    quoted = len(item) > 1 and item[0] == item[-1] and item[0] in "'\""
    return item[1:-1] if quoted else item


def _pick(axis: Axis, generator: random.Random) -> JSON:
    return axis.sample(generator) if isinstance(axis, Draw) else generator.choice(axis)
