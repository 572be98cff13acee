"""Columns of a table of runs: parameters in which the runs differ, and measured numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.records.compressors import compressor_expression
from labkit.records.run import Run, equivalence_failed, flatten

# The value of a parameter or a measured number; None if the run has no such value.
Value: TypeAlias = str | float | bool | None

# Names of measured numbers that can be plotted in every figure, even before any run has measured
# them.
RESULTS = (
    "test_accuracy",
    "test_loss",
    "wire_bytes_per_step",
    "train_seconds",
    "samples_per_second",
)
_LONG = ("source", "sha256")  # long fields of recorded functions and arrays, omitted in tables
# If a name contains one of these strings, the measured number is a duration or a speed. Durations
# and speeds are invalid if verification of the run failed.
_TIMED = ("second", "_ms", "samples_per")


def differences(runs: Sequence[Run]) -> list[dict[str, Value]]:
    """Return for each run a dict of the parameters that differ between runs (shortest names)."""
    rows = [plain_parameters(run) for run in runs]
    short = differing_parameters(rows, reached_experiment(runs))
    return [{short[name]: row[name] for name in short if name in row} for row in rows]


def reached_experiment(runs: Sequence[Run]) -> list[bool]:
    """Return, for each run, True if it has completed or the fields of its experiment are recorded.

    If a notebook job fails before its experiment starts, only the notebook's parameters are
    recorded.
    """
    return ["strategy" in run.experiment or run.status["state"] == "completed" for run in runs]


def differing_parameters(
    rows: Sequence[Mapping[str, Value]], is_recorded: Sequence[bool] | None = None
) -> dict[str, str]:
    """Return the names of parameters that differ between rows, each with its shortest unique name.

    Args:
        rows: Parameters by name, one mapping for each run.
        is_recorded: Result of `reached_experiment` for the runs in `rows`; by default, True for
            all. If `is_recorded` is False for a row, a parameter that the row lacks does not count
            as a difference.
    """
    is_recorded = [True] * len(rows) if is_recorded is None else is_recorded
    begun_names = {
        name for row, is_begun in zip(rows, is_recorded, strict=True) if is_begun for name in row
    }
    all_names = list(dict.fromkeys(name for row in rows for name in row))
    # Names are sorted by their first field, so that the parameters of a compressor are next to each
    # other.
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

    The name `learning_rate` always stays as it is, even if a strategy's outer optimizer also has a
    learning rate.
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
    """Return a run's parameters in a flat dict; strategies and callables appear only by name.

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
        if name.rpartition(".")[2] not in _LONG and value != "{}"  # empty options are omitted
    }


def _named_arrays(dataset: JSON) -> JSON:
    """Return a text for a data set of arrays (shape, checksum), e.g. `arrays 200 × 10, #850c`."""
    arrays = dataset if isinstance(dataset, list) else []
    if not arrays or not all(isinstance(array, dict) and "sha256" in array for array in arrays):
        return dataset
    shape = " × ".join(map(str, arrays[0]["shape"]))
    return f"arrays {shape}, #{''.join(str(array['sha256'])[:2] for array in arrays[:2])}"


def parameters(runs: Sequence[Run]) -> dict[str, list[Value]]:
    """Return the parameters that differ between runs, each with a list of one value per run."""
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
    """Return each run's value of a parameter that differs between runs, or of a measured number.

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
        # Suggestions list parameters first, because a misspelt name usually means a parameter.
        raise unknown_name_error(name, [*parameter_values, *available])
    return [*metric_values(runs, name)]


def unknown_name_error(name: str, all_names: Sequence[str]) -> InvalidInput:
    """Return the error for a name that is neither a differing parameter nor a measured number."""
    names = dict.fromkeys(all_names)
    return InvalidInput(
        f"no run has a differing parameter or a numeric result {name!r}"
        f"{listed(name, names, 'there are')}"
    )


def numeric_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the names of all numbers that the runs have measured, without ranges over seeds."""
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
