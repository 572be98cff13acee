"""Columns of a table of runs: parameters in which the runs differ, and measured numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.records.compressors import compressor_expression
from labkit.records.run import Run, equivalence_failed, flatten
from labkit.records.store import Record

if TYPE_CHECKING:
    import pandas


# A `Value` is a parameter's value or a measured number, or None if the run has neither.
Value: TypeAlias = str | float | bool | None

# Figures accept the metric names in `RESULTS`, even before a run has measured these metrics.
RESULTS = (
    "test_accuracy",
    "test_loss",
    "wire_bytes_per_step",
    "train_seconds",
    "samples_per_second",
)
# Tables omit the long fields `source` and `sha256` of recorded functions and arrays.
_LONG = ("source", "sha256")
# A metric is a duration or a speed if its name contains "second", "_ms" or "samples_per". Durations
# and speeds of a run are invalid if the run failed its equivalence check.
_TIMED = ("second", "_ms", "samples_per")


def differences(runs: Sequence[Run]) -> list[dict[str, Value]]:
    """Return one dict per run, from shortest names of differing parameters to values."""
    rows = [plain_parameters(run) for run in runs]
    short = differing_parameters(rows, reached_experiment(runs))
    return [{short[name]: row[name] for name in short if name in row} for row in rows]


def reached_experiment(runs: Sequence[Run]) -> list[bool]:
    """Return whether each run has completed, or has recorded the fields of its experiment.

    If a notebook job fails before its experiment starts, only the notebook's parameters are
    recorded.
    """
    return ["strategy" in run.experiment or run.status["state"] == "completed" for run in runs]


def differing_parameters(
    rows: Sequence[Mapping[str, Value]], is_recorded: Sequence[bool] | None = None
) -> dict[str, str]:
    """Return a dict from names of parameters that differ between rows to their shortest names.

    Args:
        rows: One mapping per run, from parameter names to values.
        is_recorded: Result of `reached_experiment` for the runs in `rows`; by default, True for
            all. In a row for which `is_recorded` is False, a missing parameter does not count as a
            difference.
    """
    is_recorded = [True] * len(rows) if is_recorded is None else is_recorded
    begun_names = {
        name for row, is_begun in zip(rows, is_recorded, strict=True) if is_begun for name in row
    }
    all_names = list(dict.fromkeys(name for row in rows for name in row))
    # Parameter names are sorted by the part before the first dot, so that a compressor's parameters
    # are neighbours.
    fields = list(dict.fromkeys(name.partition(".")[0] for name in all_names))
    names = sorted(all_names, key=lambda name: fields.index(name.partition(".")[0]))
    relevant_rows = {
        name: [
            row
            for row, is_begun in zip(rows, is_recorded, strict=True)
            if name in row or (is_begun and name in begun_names)
        ]
        for name in names
    }
    return {
        name: shortest_name(name, all_names)
        for name in names
        if _differs(name, relevant_rows[name])
    }


def shortest_name(name: str, all_names: Sequence[str]) -> str:
    """Return the shortest dotted suffix of a name that is not a suffix of any other name.

    The name `learning_rate` stays even if an outer optimizer has a learning rate.
    """
    parts = name.split(".")
    suffixes = (".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1))
    others = [other for other in all_names if other != name]
    return next(
        (suffix for suffix in suffixes if not any(_is_suffix(other, suffix) for other in others)),
        name,
    )


def _is_suffix(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def plain_parameters(run: Run) -> dict[str, Value]:
    """Return a run's parameters as a flat dict, with only the names of strategies and callables.

    A compressor and its options together are a single parameter.
    """
    record = dict(run.experiment)
    strategy = record.get("strategy")
    if isinstance(strategy, dict) and strategy.get("compressor") is not None:
        record["strategy"] = strategy | {
            "compressor": compressor_expression(strategy["compressor"])
        }
    if "dataset" in record:
        record["dataset"] = _named_arrays(record["dataset"])
    flat = flatten(record)
    return {
        name.removesuffix(".name").removesuffix(".callable"): value
        for name, value in flat.items()
        if name.rpartition(".")[2] not in _LONG and value != "{}"
    }


def _named_arrays(dataset: JSON) -> JSON:
    """Return a text for a data set of arrays (shape, checksum), like `arrays 200 × 10, #850c`."""
    arrays = dataset if isinstance(dataset, list) else []
    if not arrays or not all(isinstance(array, dict) and "sha256" in array for array in arrays):
        return dataset
    shape = " × ".join(map(str, arrays[0]["shape"]))
    return f"arrays {shape}, #{''.join(str(array['sha256'])[:2] for array in arrays[:2])}"


def parameters(runs: Sequence[Run]) -> dict[str, list[Value]]:
    """Return a dict from each parameter that differs between runs to one value per run."""
    rows = differences(runs)
    return {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(n for r in rows for n in r)
    }


def metric_values(runs: Sequence[Run], name: str) -> list[float | None]:
    """Return each run's value of a metric, or None if the value is missing or invalid."""
    return [_number(run, name) for run in runs]


def values_of(
    runs: Sequence[Run], name: str, parameter_values: Mapping[str, list[Value]] | None = None
) -> list[Value]:
    """Return each run's value of one differing parameter or one measured number.

    Args:
        runs: Runs to compare.
        name: Name of the parameter or measured number.
        parameter_values: Result of `parameters` for `runs`; None if it is not computed yet.

    Raises:
        InvalidInput: If no differing parameter and no measured number has this name.
    """
    parameter_values = parameters(runs) if parameter_values is None else parameter_values
    if name in parameter_values:
        return parameter_values[name]
    if name not in RESULTS and name not in (available := numeric_metrics(runs)):
        # An error message suggests parameters before metrics, because a misspelt name usually means
        # a parameter.
        raise unknown_name_error(name, [*parameter_values, *available])
    return [*metric_values(runs, name)]


def unknown_name_error(name: str, all_names: Sequence[str]) -> InvalidInput:
    """Return the error for an unknown name of a parameter or result."""
    names = dict.fromkeys(all_names)
    return InvalidInput(
        f"no run has a differing parameter or a numeric result {name!r}"
        f"{listed(name, names, 'there are')}"
    )


def numeric_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the names of all numeric metrics of the runs, without their ranges over seeds."""
    flat = (flatten(_results(run)) for run in runs)
    return sorted({name for row in flat for name, value in row.items() if is_number(value)})


def seed_range(run: Run, name: str) -> tuple[float, float] | None:
    """Return a number's minimum and maximum over a run's seeds; None if the run has one seed."""
    extremes = (run.metrics.get("spread") or {}).get(name)
    return (float(extremes[0]), float(extremes[1])) if extremes else None


def is_timed(name: str) -> bool:
    """Return whether the measured number with the given name is a duration or a speed."""
    return any(part in name for part in _TIMED)


def sorted_values(values: Sequence[Value]) -> list[Value]:
    """Return the distinct values: None, then sorted numbers, then texts in their given order."""
    # Values are compared by their repr, because Python treats True and 1 as equal.
    distinct = list({repr(value): value for value in values}.values())
    numeric = sorted(value for value in distinct if is_number(value))
    words = [value for value in distinct if value is not None and not is_number(value)]
    return [*([None] if any(value is None for value in distinct) else []), *numeric, *words]


def _differs(name: str, rows: Sequence[Mapping[str, Value]]) -> bool:
    """Return whether a parameter has different values in the rows.

    A parameter of a strategy is compared only between runs with the same strategy. Runs with
    different strategies have different parameters, and are already distinguished by the strategies'
    names.
    """
    if not name.startswith("strategy."):
        return len({repr(row.get(name)) for row in rows}) > 1
    # Rows (runs) are grouped by strategy, because the parameters of one strategy are meaningless
    # for another one.
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(repr(row.get("strategy")), set()).add(repr(row.get(name)))
    return any(len(values) > 1 for values in kinds.values())


def _number(run: Run, name: str) -> float | None:
    if equivalence_failed(run) and is_timed(name):
        return None
    results = _results(run)
    outer = name if name in results else name.partition(".")[0]
    value = flatten({outer: results.get(outer)}).get(name)
    return float(value) if is_number(value) else None


def _results(run: Run) -> dict[str, Value]:
    return {k: v for k, v in run.metrics.items() if k not in ("epochs", "spread")}


# The fields in `_NO_AXIS` are never axes of a table. Each table cell contains the median over runs
# with different seeds or names.
_NO_AXIS = ("seed", "repeats", "name", "compression_stats_every")
# The constant _MIN_COVERAGE is the minimum fraction of a grid's value combinations that have runs.
_MIN_COVERAGE = 0.75


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
    """Return the parameters (x, y) with the largest number of value combinations with runs.

    If one parameter has numbers and the other has texts, the parameter with numbers is x.

    Args:
        runs: Runs to arrange in a grid.
        x, y: Names of required parameters for the x axis and the y axis. The default None allows
            any parameter.

    Raises:
        InvalidInput: If no two parameters have runs for most of their value combinations. The error
            also occurs if all runs share a required parameter's value.
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
    # The axes are swapped if the caller requires a parameter on the other axis.
    return axes if x in (None, axes[0]) and y in (None, axes[1]) else axes[::-1]


def has_grid(runs: Iterable[Run]) -> bool:
    """Return whether two parameters have runs for most of their value combinations."""
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


_CHANCE = ("seed", "repeats")


@dataclass(frozen=True)
class Seeds(Run):
    """Completed runs that differ only in their seeds, treated as one run with repeats."""

    members: tuple[Run, ...] = ()

    @cached_property
    def metrics(self) -> Record:
        """The median of each metric over seeds, and the range in `spread`, like a run with
        repeats.
        """
        # The module `run_metrics` also imports `Experiment`, which most callers do not need. The
        # import of `run_metrics` is therefore inside the function.
        from labkit.records.run_metrics import aggregate

        return aggregate(self.seeds)

    @cached_property
    def history(self) -> pandas.DataFrame:
        """History rows of all runs in the group."""
        import pandas as pd

        return pd.concat([member.history for member in self.members], ignore_index=True)

    @property
    def seeds(self) -> list[Run]:
        """The runs of the individual seeds, one per seed."""
        return [seed for member in self.members for seed in member.seeds or [member]]


def group_seeds(runs: Sequence[Run]) -> list[Run]:
    """Combine runs that differ only in their seeds; runs without metrics remain separate.

    The groups are ordered by their first runs. Two runs with the same seed are not repeats, so the
    second run belongs to another group.
    """
    groups: dict[tuple[str, int], list[Run]] = {}
    occurrences: dict[str, int] = {}
    for index, run in enumerate(runs):
        fields = {name: value for name, value in run.experiment.items() if name not in _CHANCE}
        setting = json.dumps(fields, sort_keys=True)
        identity = json.dumps([setting, run.experiment.get("seed"), run.experiment.get("repeats")])
        occurrences[identity] = occurrences.get(identity, 0) + 1
        key = (setting, occurrences[identity]) if run.metrics else (str(index), 0)
        groups.setdefault(key, []).append(run)
    return [
        members[0] if len(members) == 1 else Seeds(members[0].path, tuple(members))
        for members in groups.values()
    ]
