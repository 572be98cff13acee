"""The columns of a table of runs: parameters in which they differ, numbers that were measured."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput
from labkit.records.compressors import called
from labkit.records.run import Run, flatten, gate_failed

# What a parameter of a run is, or a number that was measured; None: the run has none.
Value: TypeAlias = str | float | bool | None

# What every figure over any of the numbers may ask for, whether a run has it yet or not.
RESULTS = (
    "test_accuracy",
    "test_loss",
    "wire_bytes_per_step",
    "train_seconds",
    "samples_per_second",
)
_LONG = ("source", "sha256")  # of a user's own callable or arrays: its name stands for them
# Whatever was timed is a speed; a run that failed its gate has none.
_TIMED = ("second", "_ms", "samples_per")


def differences(runs: Sequence[Run]) -> list[dict[str, Value]]:
    """Each run's parameters that are not the same in all, under their shortest clear names."""
    rows = [plain_parameters(run) for run in runs]
    short = differing(rows, begun(runs))
    return [{short[name]: row[name] for name in short if name in row} for row in rows]


def begun(runs: Sequence[Run]) -> list[bool]:
    """Whether each came as far as an experiment, or ended without one.

    Of a job that failed before, nothing is known but what its notebook was given.
    """
    return ["strategy" in run.experiment or run.status["state"] == "completed" for run in runs]


def differing(
    rows: Sequence[Mapping[str, Value]], known: Sequence[bool] | None = None
) -> dict[str, str]:
    """The parameters that are not the same in all rows, and the shortest clear name of each.

    Args: known, see `begun`: between the others and these what one side lacks tells nothing.
    """
    known = [True] * len(rows) if known is None else known
    of_known = {name for row, own in zip(rows, known, strict=True) if own for name in row}
    every = list(dict.fromkeys(name for row in rows for name in row))
    # By field, so that a compressor's ratio stands beside it although other runs have none.
    fields = list(dict.fromkeys(name.partition(".")[0] for name in every))
    names = sorted(every, key=lambda name: fields.index(name.partition(".")[0]))
    asked = {
        name: [
            row
            for row, own in zip(rows, known, strict=True)
            if name in row or (own and name in of_known)
        ]
        for name in names
    }
    return {name: clear(name, every) for name in names if _differs(name, asked[name])}


def clear(name: str, every: Sequence[str]) -> str:
    """The shortest end of a dotted name that is the end of no other.

    Of the learning rate and that of a strategy's outer steps the former keeps its name.
    """
    parts = name.split(".")
    ends = (".".join(parts[place:]) for place in range(len(parts) - 1, 0, -1))
    others = [other for other in every if other != name]
    return next((end for end in ends if not any(_ends(other, end) for other in others)), name)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def plain_parameters(run: Run) -> dict[str, Value]:
    """Flat parameters; a strategy or callable stands under its field's own name, not its source.

    A compressor with all that is in it is one parameter.
    """
    record = dict(run.experiment)
    strategy = record.get("strategy")
    if isinstance(strategy, dict) and strategy.get("compressor") is not None:
        record["strategy"] = strategy | {"compressor": called(strategy["compressor"])}
    if "dataset" in record:
        record["dataset"] = _named_arrays(record["dataset"])
    flat = flatten(record)
    return {
        name.removesuffix(".name").removesuffix(".callable"): value
        for name, value in flat.items()
        if name.rpartition(".")[2] not in _LONG and value != "{}"  # no options are no parameter
    }


def _named_arrays(dataset: JSON) -> JSON:
    """`arrays 200 × 10, #850c`: a few digits of their checksum tell data of one shape apart."""
    arrays = dataset if isinstance(dataset, list) else []
    if not arrays or not all(isinstance(array, dict) and "sha256" in array for array in arrays):
        return dataset
    shape = " × ".join(map(str, arrays[0]["shape"]))
    return f"arrays {shape}, #{''.join(str(array['sha256'])[:2] for array in arrays[:2])}"


def parameters(runs: Sequence[Run]) -> dict[str, list[Value]]:
    """The parameters in which the runs differ, by name: one value a run, None where it has none."""
    rows = differences(runs)
    return {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(n for r in rows for n in r)
    }


def measured(runs: Sequence[Run], name: str) -> list[float | None]:
    """One number a run; None where it was not measured, or may not be shown."""
    return [_number(run, name) for run in runs]


def values_of(
    runs: Sequence[Run], name: str, given: Mapping[str, list[Value]] | None = None
) -> list[Value]:
    """A parameter that differs, or a number that was measured: one value a run.

    Args: given, the `parameters` of the runs, where they are known.
    Raises: InvalidInput, where no run has it, and no run ever could.
    """
    given = parameters(runs) if given is None else given
    if name in given:
        return given[name]
    if name not in RESULTS and name not in (found := numbers(runs)):
        # Parameters first: a misspelt name is more often one of them.
        raise unknown(name, [*given, *found])
    return [*measured(runs, name)]


def unknown(name: str, known: Sequence[str]) -> InvalidInput:
    """What to say of a name that no run knows."""
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return InvalidInput(
        f"no run has a differing parameter or a number {name!r}{hint}; there are: "
        f"{', '.join(dict.fromkeys(known))}"
    )


def numbers(runs: Sequence[Run]) -> list[str]:
    """The names of all numbers that were measured, without the extremes of seeds."""
    flat = (flatten(_results(run)) for run in runs)
    return sorted({name for row in flat for name, value in row.items() if is_number(value)})


def spread(run: Run, name: str) -> tuple[float, float] | None:
    """The least and the greatest of the run's seeds; None for a run of one seed."""
    ends = (run.metrics.get("spread") or {}).get(name)
    return (float(ends[0]), float(ends[1])) if ends else None


def is_timed(name: str) -> bool:
    """Whether the number is a speed or a duration."""
    return any(part in name for part in _TIMED)


def ordered(values: Sequence[Value]) -> list[Value]:
    """The distinct values: numbers by size, then words as they come; what is missing first."""
    # By their text: True and 1 are equal to Python, and different words to a reader.
    distinct = list({repr(value): value for value in values}.values())
    found = sorted(value for value in distinct if is_number(value))
    words = [value for value in distinct if value is not None and not is_number(value)]
    return [*([None] if any(value is None for value in distinct) else []), *found, *words]


def _differs(name: str, rows: Sequence[Mapping[str, Value]]) -> bool:
    """Whether a parameter tells runs apart; of a strategy's own, among runs of that strategy.

    Where strategies differ, all of their fields do, and their names alone say more.
    """
    if not name.startswith("strategy."):
        return len({repr(row.get(name)) for row in rows}) > 1
    # By strategy: its fields mean nothing to runs of another one.
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
