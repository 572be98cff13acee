"""Results as a function of two parameters, with runs for most combinations of their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.records.analysis.columns import (
    RESULTS,
    Value,
    metric_values,
    numeric_metrics,
    parameters,
    sorted_values,
    unknown_name_error,
    values_of,
)
from labkit.records.run import Run, equivalence_failed

if TYPE_CHECKING:
    import pandas

# The fields in `_NO_AXIS` are never used as axes, because each table cell contains the median over
# their values.
_NO_AXIS = ("seed", "repeats", "name", "compression_stats_every")
_MIN_COVERAGE = 0.75  # minimum fraction of value combinations that have runs


def cross_table(
    runs: Mapping[str, Run], x: str, y: str, measures: Sequence[str] = ()
) -> pandas.DataFrame:
    """Return one row per combination of two parameters' values, sorted by y, then by x.

    The columns are the two parameters (by name), `runs`, `equivalence_failed`, and the measures.
    The column `runs` contains the names of the runs with the row's two parameter values.
    The column `equivalence_failed` is the number of the row's runs that failed the equivalence
    check. Each measure is a median over the row's runs.

    Args:
        runs: Runs by name.
        x, y: Names of two parameters in which the runs differ.
        measures: Names of metrics; by default samples_per_second and test_accuracy, or test_loss if
            there is no accuracy.

    Raises:
        InvalidInput: If no run has one of the metrics in `measures`.
    """
    import pandas as pd

    run_list = list(runs.values())
    x_values, y_values = values_of(run_list, x), values_of(run_list, y)
    cells: dict[tuple[int, int], list[int]] = {}
    # The values of both parameters are sorted, so that a figure shows trends.
    for index, (row, column) in enumerate(zip(_indices(y_values), _indices(x_values), strict=True)):
        cells.setdefault((row, column), []).append(index)
    cell_indices = [indices for _, indices in sorted(cells.items())]
    names, available = list(runs), numeric_metrics(run_list)
    table = pd.DataFrame(
        {
            x: pd.Series([x_values[indices[0]] for indices in cell_indices], dtype=object),
            y: pd.Series([y_values[indices[0]] for indices in cell_indices], dtype=object),
            "runs": [tuple(names[index] for index in indices) for indices in cell_indices],
            "equivalence_failed": [
                sum(equivalence_failed(run_list[index]) for index in indices)
                for indices in cell_indices
            ],
        }
    )
    for name in measures or _quality_measures(run_list):
        if name not in (*RESULTS, *available):
            raise unknown_name_error(name, [*parameters(run_list), *available])
        values = metric_values(run_list, name)
        table[name] = [_median([values[index] for index in indices]) for indices in cell_indices]
    return table


def axes_of(runs: Sequence[Run], x: str | None = None, y: str | None = None) -> tuple[str, str]:
    """Return the pair of parameters (x, y) for which the most combinations of values have runs.

    If one parameter has numbers and the other has texts, the parameter with numbers is x.

    Args:
        runs: Runs to arrange in a grid.
        x, y: Names of parameters that must be used on the x axis and the y axis; None (default) if
            any parameter may be used.

    Raises:
        InvalidInput: If no two parameters have runs for most of their combinations, or if the runs
            do not differ in a required parameter.
    """
    parameter_values = parameters(runs)
    for name in (x, y):
        if name is not None and name not in parameter_values:
            raise unknown_name_error(name, [*parameter_values, *numeric_metrics(runs)])
    if x is not None and y is not None:
        return x, y
    axes = _largest_grid(parameter_values, x or y)
    if axes is None:
        raise InvalidInput(
            "no two parameters have runs for most combinations of their values; give two "
            f"differing parameters as x and y: {', '.join(parameter_values) or 'none'}"
        )
    # The axes are swapped if a required parameter is on the wrong axis.
    return axes if x in (None, axes[0]) and y in (None, axes[1]) else axes[::-1]


def has_grid(runs: Iterable[Run]) -> bool:
    """Return whether two parameters have runs for most combinations, as a heat map requires."""
    return _largest_grid(parameters(list(runs))) is not None


def _largest_grid(
    parameter_values: dict[str, list[Value]], fixed: str | None = None
) -> tuple[str, str] | None:
    names = [name for name in parameter_values if name not in _NO_AXIS or name == fixed]
    pairs = [pair for pair in combinations(names, 2) if fixed is None or fixed in pair]
    y, x = max(pairs, key=lambda pair: _grid_size(parameter_values, *pair), default=("", ""))
    if not x or not _grid_size(parameter_values, y, x):
        return None
    return (
        (y, x) if _has_text(parameter_values[x]) and not _has_text(parameter_values[y]) else (x, y)
    )


def _grid_size(parameter_values: dict[str, list[Value]], one: str, other: str) -> int:
    """Return the number of value combinations with runs, or 0 if too many have no run."""
    pairs = {
        (repr(a), repr(b))
        for a, b in zip(parameter_values[one], parameter_values[other], strict=True)
    }
    sides = [len(set(values)) for values in zip(*pairs, strict=True)]
    enough = min(sides, default=0) > 1 and len(pairs) >= _MIN_COVERAGE * sides[0] * sides[1]
    return len(pairs) if enough else 0


def _has_text(values: Sequence[Value]) -> bool:
    return any(isinstance(value, str) for value in values)


def _indices(values: Sequence[Value]) -> list[int]:
    """Return the index of each value among the sorted distinct values."""
    index_of = {repr(value): index for index, value in enumerate(sorted_values(values))}
    return [index_of[repr(value)] for value in values]


def _median(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return median(present) if present else float("nan")


def _quality_measures(runs: Sequence[Run]) -> tuple[str, str]:
    # Regression runs have no accuracy, so their test loss is used instead.
    quality = "test_accuracy" if any(metric_values(runs, "test_accuracy")) else "test_loss"
    return quality, "samples_per_second"
