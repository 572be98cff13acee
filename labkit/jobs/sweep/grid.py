"""The combinations of a sweep: every one of a grid, or some at random."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.jobs.sweep.axis import LARGEST, Axis, Draw

Combination = dict[str, Any]


def every(axes: Mapping[str, Axis]) -> list[Combination]:
    """All combinations, the last parameter changing fastest.

    Raises:
        InvalidInput: more than LARGEST, or a distribution, which has no "every".
    """
    lists: dict[str, tuple[Any, ...]] = {}
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
    """As many combinations at random, none twice: the same seed gives the same ones.

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
        grid = every(axes)
        return [grid[place] for place in sorted(generator.sample(range(there), count))]
    found: dict[str, Combination] = {}
    for _ in range(100 * count):
        one = {name: _pick(axis, generator) for name, axis in axes.items()}
        found.setdefault(repr(one), one)
        if len(found) == count:
            return list(found.values())
    raise InvalidInput(
        f"--random {count}: the distributions give {len(found)} different combinations; "
        "ask for fewer, or widen them"
    )


def _pick(axis: Axis, generator: random.Random) -> Any:
    return axis.sample(generator) if isinstance(axis, Draw) else generator.choice(axis)
