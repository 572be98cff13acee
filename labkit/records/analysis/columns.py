"""Columns for a table of runs: the parameters in which the runs differ, and measured numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.records.compressors import compressor_expression
from labkit.records.run import Run, flatten, gate_failed

# The value of a parameter or of a measured number; None if the run lacks the parameter or number.
Value: TypeAlias = str | float | bool | None

# Measured numbers that every figure accepts, even if no run has them yet.
RESULTS = (
    "test_accuracy",
    "test_loss",
    "wire_bytes_per_step",
    "train_seconds",
    "samples_per_second",
)
_LONG = ("source", "sha256")  # long fields of a user's callable or arrays, left out of tables
# Parts of the names of timed numbers. Their values are invalid if a run failed verification.
_TIMED = ("second", "_ms", "samples_per")


def differences(runs: Sequence[Run]) -> list[dict[str, Value]]:
    """Return each run's parameters that differ between runs, under their shortest unique names."""
    rows = [plain_parameters(run) for run in runs]
    short = differing_parameters(rows, reached_experiment(runs))
    return [{short[name]: row[name] for name in short if name in row} for row in rows]


def reached_experiment(runs: Sequence[Run]) -> list[bool]:
    """Return for each run whether its experiment's fields are known, or the run has completed.

    Of a notebook job that failed before its experiment, only the notebook's parameters are known.
    """
    return ["strategy" in run.experiment or run.status["state"] == "completed" for run in runs]


def differing_parameters(
    rows: Sequence[Mapping[str, Value]], is_recorded: Sequence[bool] | None = None
) -> dict[str, str]:
    """Return the parameters that differ between rows, with their shortest unique names.

    Args:
        rows: Parameters by name, one mapping for each run.
        is_recorded: Result of `reached_experiment` for the rows; default: all true. A parameter
            that is missing in a row with False is no difference.
    """
    is_recorded = [True] * len(rows) if is_recorded is None else is_recorded
    begun_names = {
        name for row, is_begun in zip(rows, is_recorded, strict=True) if is_begun for name in row
    }
    all_names = list(dict.fromkeys(name for row in rows for name in row))
    # Sorting by field puts a compressor's parameters next to the compressor.
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
    """Return the shortest dotted suffix of a name that is not a suffix of another name.

    `learning_rate` keeps its name even if a strategy's outer optimizer also has a learning rate.
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
    """Return a run's flattened parameters, in which strategies and callables appear by name only.

    A compressor and its options together are one parameter.
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
        if name.rpartition(".")[2] not in _LONG and value != "{}"  # Empty options are left out.
    }


def _named_arrays(dataset: JSON) -> JSON:
    """Return text for a data set of arrays: `arrays 200 × 10, #850c`, with digits of checksums."""
    arrays = dataset if isinstance(dataset, list) else []
    if not arrays or not all(isinstance(array, dict) and "sha256" in array for array in arrays):
        return dataset
    shape = " × ".join(map(str, arrays[0]["shape"]))
    return f"arrays {shape}, #{''.join(str(array['sha256'])[:2] for array in arrays[:2])}"


def parameters(runs: Sequence[Run]) -> dict[str, list[Value]]:
    """Return the parameters in which runs differ, by name: one value per run, None if missing."""
    rows = differences(runs)
    return {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(n for r in rows for n in r)
    }


def metric_values(runs: Sequence[Run], name: str) -> list[float | None]:
    """Return a number per run; None if not measured, or timed in a run that failed verification."""
    return [_number(run, name) for run in runs]


def values_of(
    runs: Sequence[Run], name: str, parameter_values: Mapping[str, list[Value]] | None = None
) -> list[Value]:
    """Return the values, one per run, of a parameter in which runs differ or of a measured number.

    Args:
        runs: Runs to compare.
        name: Name of the parameter or measured number.
        parameter_values: Result of `parameters` for the runs, if available.

    Raises:
        InvalidInput: No run has a parameter or number of this name.
    """
    parameter_values = parameters(runs) if parameter_values is None else parameter_values
    if name in parameter_values:
        return parameter_values[name]
    if name not in RESULTS and name not in (available := numeric_metrics(runs)):
        # Suggestions start with parameters, because a misspelt name is more often a parameter.
        raise unknown_name_error(name, [*parameter_values, *available])
    return [*metric_values(runs, name)]


def unknown_name_error(name: str, all_names: Sequence[str]) -> InvalidInput:
    """Return the error for a name that is neither a differing parameter nor a number of any run."""
    names = dict.fromkeys(all_names)
    return InvalidInput(
        f"no run has a differing parameter or a numeric result {name!r}"
        f"{listed(name, names, 'there are')}"
    )


def numeric_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the names of the numbers that any run has measured, without ranges over seeds."""
    flat = (flatten(_results(run)) for run in runs)
    return sorted({name for row in flat for name, value in row.items() if is_number(value)})


def seed_range(run: Run, name: str) -> tuple[float, float] | None:
    """Return a number's minimum and maximum over the run's seeds, or None for a run of one seed."""
    extremes = (run.metrics.get("spread") or {}).get(name)
    return (float(extremes[0]), float(extremes[1])) if extremes else None


def is_timed(name: str) -> bool:
    """Return True if the number of this name is a speed or a duration."""
    return any(part in name for part in _TIMED)


def sorted_values(values: Sequence[Value]) -> list[Value]:
    """Return the distinct values: first None, then sorted numbers, then texts as they occur."""
    # Values are compared by repr, because Python considers True and 1 equal.
    distinct = list({repr(value): value for value in values}.values())
    numeric = sorted(value for value in distinct if is_number(value))
    words = [value for value in distinct if value is not None and not is_number(value)]
    return [*([None] if any(value is None for value in distinct) else []), *numeric, *words]


def _differs(name: str, rows: Sequence[Mapping[str, Value]]) -> bool:
    """Return True if a parameter differs between rows.

    A strategy's fields are compared only among runs of the same strategy. Different strategies have
    different fields, and their names already distinguish them.
    """
    if not name.startswith("strategy."):
        return len({repr(row.get(name)) for row in rows}) > 1
    # Rows are grouped by strategy, because a strategy's fields mean nothing for other strategies.
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(repr(row.get("strategy")), set()).add(repr(row.get(name)))
    return any(len(values) > 1 for values in kinds.values())


def _number(run: Run, name: str) -> float | None:
    if gate_failed(run) and is_timed(name):
        return None
    results = _results(run)
    outer = name if name in results else name.partition(".")[0]
    value = flatten({outer: results.get(outer)}).get(name)
    return float(value) if is_number(value) else None


def _results(run: Run) -> dict[str, Value]:
    return {k: v for k, v in run.metrics.items() if k not in ("epochs", "spread")}
