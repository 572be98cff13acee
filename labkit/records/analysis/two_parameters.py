"""A result over two parameters, where the runs have most of their combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.records.analysis.columns import (
    RESULTS,
    Value,
    measured,
    numbers,
    ordered,
    parameters,
    unknown,
    values_of,
)
from labkit.records.run import Run, gate_failed

if TYPE_CHECKING:
    import pandas

# Chance, a label and a closer look are what cells take the median over.
_NO_AXIS = ("seed", "repeats", "name", "microscope")
_FILLED = 0.75  # of all combinations: with fewer it is no grid


def crossed(
    runs: Mapping[str, Run], x: str, y: str, measures: Sequence[str] = ()
) -> pandas.DataFrame:
    """A row a combination of two parameters that runs have, sorted by y, then by x.

    Columns: the parameters, under their own names; runs, the names of those with this combination;
    gate_failed, how many of them no speed is told of; and each measure, the median of its runs in
    the unit that its name says, missing where there is none.

    Args: runs: by name; x, y: parameters that differ; measures: names of metrics (by default test
    accuracy or loss, and samples_per_second).
    Raises: InvalidInput, a measure that no run has.
    """
    import pandas as pd

    found = list(runs.values())
    across, up = values_of(found, x), values_of(found, y)
    cells: dict[tuple[int, int], list[int]] = {}
    # Both sorted, so that a trend is seen as one.
    for place, (row, column) in enumerate(zip(_places(up), _places(across), strict=True)):
        cells.setdefault((row, column), []).append(place)
    own = [places for _, places in sorted(cells.items())]
    names, known = list(runs), numbers(found)
    table = pd.DataFrame(
        {
            x: pd.Series([across[places[0]] for places in own], dtype=object),
            y: pd.Series([up[places[0]] for places in own], dtype=object),
            "runs": [tuple(names[place] for place in places) for places in own],
            "gate_failed": [sum(gate_failed(found[place]) for place in places) for places in own],
        }
    )
    for name in measures or _judged(found):
        if name not in (*RESULTS, *known):
            raise unknown(name, [*parameters(found), *known])
        values = measured(found, name)
        table[name] = [_median([values[place] for place in places]) for places in own]
    return table


def axes_of(runs: Sequence[Run], x: str | None = None, y: str | None = None) -> tuple[str, str]:
    """The two parameters that make the largest grid: numbers to the right, words down.

    Args: x, y: what is asked for; None: found.
    Raises: InvalidInput, where nothing makes a grid, or no run has such a parameter.
    """
    given = parameters(runs)
    for name in (x, y):
        if name is not None and name not in given:
            raise unknown(name, [*given, *numbers(runs)])
    if x is not None and y is not None:
        return x, y
    found = _largest(given, x or y)
    if found is None:
        raise InvalidInput(
            "no two parameters of these runs have runs for most of their combinations; name "
            f"two of those that differ as x and y: {', '.join(given) or 'there are none'}"
        )
    # The largest grid may have the parameter that was asked for on the other axis.
    return found if x in (None, found[0]) and y in (None, found[1]) else found[::-1]


def has_grid(runs: Iterable[Run]) -> bool:
    """Whether two parameters make a grid of which a heat map can be drawn."""
    return _largest(parameters(list(runs))) is not None


def _largest(given: dict[str, list[Value]], fixed: str | None = None) -> tuple[str, str] | None:
    names = [name for name in given if name not in _NO_AXIS or name == fixed]
    pairs = [pair for pair in combinations(names, 2) if fixed is None or fixed in pair]
    y, x = max(pairs, key=lambda pair: _filled(given, *pair), default=("", ""))
    if not x or not _filled(given, y, x):
        return None
    return (y, x) if _words(given[x]) and not _words(given[y]) else (x, y)


def _filled(given: dict[str, list[Value]], one: str, other: str) -> int:
    """The number of combinations that have runs; 0 where they make no grid."""
    pairs = {(repr(a), repr(b)) for a, b in zip(given[one], given[other], strict=True)}
    sides = [len(set(each)) for each in zip(*pairs, strict=True)]
    enough = min(sides, default=0) > 1 and len(pairs) >= _FILLED * sides[0] * sides[1]
    return len(pairs) if enough else 0


def _words(values: Sequence[Value]) -> bool:
    return any(isinstance(value, str) for value in values)


def _places(values: Sequence[Value]) -> list[int]:
    """The place of each value among the distinct ones."""
    place = {repr(value): number for number, value in enumerate(ordered(values))}
    return [place[repr(value)] for value in values]


def _median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else float("nan")


def _judged(runs: Sequence[Run]) -> tuple[str, str]:
    # A regression has no accuracy.
    judged = "test_accuracy" if any(measured(runs, "test_accuracy")) else "test_loss"
    return judged, "samples_per_second"
