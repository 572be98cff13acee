"""The plan of a sweep: its notebook runs in order, all validated before the first starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import fingerprint
from labkit.jobs import cells, parameters
from labkit.jobs.parameters import Known, Values
from labkit.jobs.sweep import grid
from labkit.jobs.sweep.grid import LARGEST, Axis, Combination, Draw, from_text, from_yaml
from labkit.records import store

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON, is_number


@dataclass(frozen=True)
class Search:
    """A search that maximizes or minimizes metrics of the runs.

    Attributes:
        objectives: Names of the metrics. A value is true if the search maximizes the metric, and
            false if it minimizes the metric. `accuracy` means the accuracy on held-out data, which
            records call `test_accuracy`.
        trials: Total number of notebook runs that the search tries.
        prune: Name of Optuna's pruner. A pruner stops runs that are worse than other runs at the
            same step. With None, no run is pruned. In records of older labkit versions, the value
            true means the median pruner.
        sampler: Name of Optuna's sampler.
        seed: Seed of the sampler.
        axes: Possible values of each searched parameter, or the distribution of these values.
        fixed: Parameters with the same value in all runs.
        enqueued: Values of the first trials, by parameter; the sampler chooses missing values.
    """

    objectives: Mapping[str, bool]
    trials: int
    prune: str | None
    sampler: str
    seed: int
    axes: Mapping[str, Axis]
    fixed: Mapping[str, JSON]
    enqueued: Sequence[Mapping[str, JSON]] = ()

    def __post_init__(self) -> None:
        if self.prune and len(self.objectives) > 1:
            raise InvalidInput(
                f"--prune needs one objective, but the search has {', '.join(self.objectives)}; "
                "remove --prune, or all objectives but one"
            )
        if len(self.enqueued) > self.trials:
            raise InvalidInput(
                f"--enqueue gives {len(self.enqueued)} trials, more than --trials {self.trials}; "
                "give a larger number of trials"
            )
        if not 1 <= self.trials <= LARGEST:
            raise InvalidInput(f"--trials {self.trials} is impossible; give 1 to {LARGEST:,}")

    def to_json(self) -> dict[str, JSON]:
        """Return the fields as JSON, for the record of the sweep."""
        axes = {
            name: asdict(axis) if isinstance(axis, Draw) else list(axis)
            for name, axis in self.axes.items()
        }
        return asdict(replace(self, axes={})) | {"axes": axes}


def of_record(record: store.Record) -> Search:
    """Return the search that a sweep's record describes.

    Raises:
        LabkitError: The record does not describe a search.
    """
    from labkit.records.analysis.curves import objectives  # imports NumPy

    try:
        axes = {
            name: Draw(**axis) if isinstance(axis, dict) else tuple(axis)
            for name, axis in record["axes"].items()
        }
        prune = {True: "median", False: None}.get(record["prune"], record["prune"])
        others = {name: record[name] for name in record.keys() - {"metric", "maximize"}}
        fields = {"axes": axes, "prune": prune, "objectives": objectives(record)}
        return Search(**others | fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise LabkitError(f"the sweep's record of its search is invalid: {error}") from error


# The type `Described` is a pair: parameter values, and the index of the repeat, from 0.
Described: TypeAlias = tuple[Combination, int]


@dataclass(frozen=True)
class SweepMember:
    """A notebook run of a sweep: one execution with one set of parameter values.

    Attributes:
        folder: Name of the job's folder.
        values: Parameter values, converted to the types that the notebook declares.
        repeat: Index of the repeat, from 0, among notebook runs with the same values.
        workers: Maximum number of ranks that the notebook requests; 1 if the notebook has no
            parameter `workers`.
        threads: Maximum number of threads per rank; 1 if the notebook has no parameter `threads`.
        known: Whether the notebook has a parameter `workers`; without it, the number of ranks is
            unknown.
    """

    folder: str
    values: dict[str, JSON]
    repeat: int
    workers: int
    threads: int
    known: bool = True

    @property
    def cores(self) -> int | None:
        """The number of cores, ranks × threads; None if it is unknown before the run."""
        return self.workers * self.threads if self.known else None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the cluster: number of workers, and number of threads per worker."""
        return self.workers, self.threads


@dataclass(frozen=True)
class SweepPlan:
    """The notebook runs of a sweep; a search adds notebook runs while it is in progress."""

    notebook: Path
    members: list[SweepMember]
    # The attribute `search` is None if the sweep is a grid or a random sample.
    search: Search | None = None

    @property
    def name(self) -> str:
        """The sweep's name: a hash of the notebook's path and of the requested values."""
        request: JSON = [[member.values, member.repeat] for member in self.members]
        if self.search is not None:
            request = self.search.to_json()
        # The hash excludes the notebook's content. `--resume` therefore finds the sweep after the
        # user has corrected the notebook.
        return _digest([store.recorded_path(self.notebook), request])

    @cached_property
    def text(self) -> str:
        """The notebook's text at the start of the sweep; later edits do not affect the sweep."""
        return cells.text(self.notebook)

    @cached_property
    def _code(self) -> list[JSON]:
        """The code that determines results: the notebook's code cells and labkit's source."""
        # Markdown cells and outputs are omitted. A change of a Markdown cell or an output does not
        # affect results.
        code: list[JSON] = [
            [cell.source, [*cell.tags]]
            for cell in cells.parse(self.text, self.notebook)
            if cell.kind == "code"
        ]
        return [code, fingerprint()]

    def content(self, member: SweepMember) -> str:
        """Return the hash of a notebook run's inputs: code cells, values and labkit's source."""
        return _digest([self._code, member.values, member.repeat])


@dataclass(frozen=True)
class SweepSpec:
    """A user's request for a sweep: swept parameters, fixed values and the number of draws."""

    # A `SweepSpec` is not validated yet; a `SweepPlan` contains only validated notebook runs.

    axes: dict[str, Axis]
    fixed: Values
    random: int | None = None
    seed: int = 0
    repeats: int = 1
    # Each group names parameters whose values are paired, as by Python's `zip`.
    zipped: Sequence[Sequence[str]] = ()


def read_assignments(texts: tuple[str, ...]) -> dict[str, Axis]:
    """Return the swept values of each parameter from command-line assignments `name=values`.

    Raises:
        InvalidInput: An assignment lacks a name or values, or assigns to a name for the second
            time.
    """
    axes: dict[str, Axis] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise InvalidInput(f"{text!r} is not of the form name=a,b,c or name=range(1,5)")
        if name in axes:
            raise InvalidInput(f"{name} is given twice; give all its values in one list")
        axes[name] = from_text(name, values)
    return axes


def read_trial(text: str) -> Combination:
    """Return the values of an enqueued trial, such as `a=1,b=2`.

    Raises:
        InvalidInput: An item is not of the form `name=value`, or a name is given twice.
    """
    values: Combination = {}
    for item in grid.split("--enqueue", text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name.isidentifier() or name in values:
            raise InvalidInput(f"--enqueue {text} is not of the form a=1,b=2, with each name once")
        values[name] = grid.unquoted(value)
    return values


def read_file(
    text: str, origin: str
) -> tuple[dict[str, Axis], dict[str, int], list[Sequence[str]]]:
    """Return the values of each parameter in a sweep file, and the entries `random` and `zip`.

    Raises:
        InvalidInput: The text is not YAML of the form `name: values`, or the entry `random` or
            `zip` has another form.
    """
    record = parameters.read_yaml(text, origin)
    zipped = _read_zip(record.pop("zip", []), origin)
    random_entry = record.pop("random", {})
    if type(random_entry) is int:
        random_entry = {"samples": random_entry}
    entries = random_entry if isinstance(random_entry, dict) else {"": random_entry}
    known_entries = {name: entries[name] for name in entries.keys() & {"samples", "seed"}}
    numbers = {name: number for name, number in known_entries.items() if type(number) is int}
    if len(numbers) < len(entries):
        raise InvalidInput(
            f"{origin}: random: {random_entry!r} is invalid; give a number, or numbers for samples "
            "and seed"
        )
    return {name: from_yaml(name, value) for name, value in record.items()}, numbers, zipped


def _read_zip(entry: JSON, origin: str) -> list[Sequence[str]]:
    """Return the groups of zipped parameters in a sweep file's entry `zip`."""
    is_nested = isinstance(entry, list) and all(isinstance(group, list) for group in entry)
    groups: list[Sequence[str]] = []
    for group in entry if isinstance(entry, list) and is_nested else [entry]:
        if not isinstance(group, list) or not all(isinstance(name, str) for name in group):
            raise InvalidInput(
                f"{origin}: zip: {entry!r} is invalid; give a list of parameter names, such as "
                "[a, b], or a list of such lists"
            )
        groups.append(group)
    return groups


def make_search(
    notebook: Path,
    axes: Mapping[str, Axis],
    search: Search,
    zipped: Sequence[Sequence[str]] = (),
) -> tuple[SweepPlan, int]:
    """Return a search's plan, still without notebook runs, and the maximum number of ranks.

    Raises:
        InvalidInput: A name is unknown, a value is not allowed, or no parameter is searched.
    """
    if not axes:
        raise InvalidInput(
            "a search needs a parameter to vary; give name=a,b,c or name=uniform(0,1)"
        )
    declared, axes, fixed = _convert_request(notebook, axes, search.fixed, zipped)
    enqueued = tuple(_enqueued(declared, axes, trial) for trial in search.enqueued)
    ends = {name: [a.low, a.high] if isinstance(a, Draw) else [*a] for name, a in axes.items()}
    first_values = {name: values[0] for name, values in ends.items()} | fixed
    # Each value is tested only with the first values of all other parameters, as in
    # `parameters.check_fields`.
    probes = [first_values | {name: value} for name, values in ends.items() for value in values]
    members = [_member(notebook, declared, "", grid.unzip(values), 0) for values in probes]
    search = replace(search, axes=axes, fixed=fixed, enqueued=enqueued)
    plan = SweepPlan(notebook, [], search)
    return plan, max(member.workers for member in members)


def _enqueued(declared: Known, axes: Mapping[str, Axis], trial: Values) -> Combination:
    """Return the values of an enqueued trial for each axis, converted and validated."""
    searched = {name: names for names in axes for name in names.split(",")}
    if unknown := next((name for name in trial if name not in searched), None):
        raise InvalidInput(
            f"--enqueue sets {unknown}, which is not searched; allowed: {', '.join(searched)}"
        )
    converted = {name: declared[name].convert(value) for name, value in trial.items()}
    chosen: Combination = {}
    for names in dict.fromkeys(searched[name] for name in trial):
        group, axis = names.split(","), axes[names]
        values = [converted.get(name) for name in group]
        value = values if len(group) > 1 else values[0]
        if not _is_in(value, axis):
            text = f"{axis.low:g} to {axis.high:g}" if isinstance(axis, Draw) else json.dumps(axis)
            raise InvalidInput(
                f"--enqueue sets {names} to {json.dumps(value)}, which the search does not try; "
                f"allowed: {text}"
            )
        chosen[names] = value
    return chosen


def _is_in(value: JSON, axis: Axis) -> bool:
    if isinstance(axis, Draw):
        return is_number(value) and axis.low <= value <= axis.high
    return json.dumps(value) in map(json.dumps, axis)


def next_member(plan: SweepPlan, number: int, chosen: Combination, fixed: Values) -> SweepMember:
    """Validate the chosen values, and return the search's notebook run with the given number."""
    declared = parameters.declared(plan.notebook)
    values = grid.unzip(chosen)
    folder = store.job_name(number, values)
    return _member(plan.notebook, declared, folder, {**values, **fixed}, 0)


def make(notebook: Path, spec: SweepSpec) -> SweepPlan:
    """Return the plan of a sweep; validate the values of each notebook run as `labkit run` does.

    In a plan with repeats, each repeat adds 1 to the notebook's parameter `seed`. If the notebook
    has no parameter `seed`, the repeats have the same values.

    Raises:
        InvalidInput: A name is unknown, or a value is not allowed. A plan with no or too many
            notebook runs also raises InvalidInput.
    """
    if spec.repeats < 1:
        raise InvalidInput(f"--repeats {spec.repeats} is impossible; give a whole number from 1")
    declared, axes, fixed = _convert_request(notebook, spec.axes, spec.fixed, spec.zipped)
    if spec.random is None:
        combinations = grid.all_combinations(axes)
    else:
        combinations = grid.random_combinations(axes, spec.random, spec.seed)
    if len(combinations) * spec.repeats > LARGEST:
        raise InvalidInput(
            f"{len(combinations):,} combinations × {spec.repeats} repeats exceed the maximum of a "
            f"sweep ({LARGEST:,}); give fewer values or repeats"
        )
    swept = [
        name
        for names, axis in axes.items()
        if not isinstance(axis, tuple) or len(axis) > 1
        for name in names.split(",")
    ]
    if spec.repeats > 1 and "seed" in swept:
        raise InvalidInput(
            "--repeats increments the parameter seed, which is also swept; give one of the two"
        )
    described = [
        ({**grid.unzip(combination), **fixed}, repeat)
        for combination in combinations
        for repeat in range(spec.repeats)
    ]
    if spec.repeats > 1:
        described = [_repeat_values(declared, values, repeat) for values, repeat in described]
        swept.append("seed" if "seed" in declared else "repeat")
    return _plan(notebook, declared, described, swept)


def _convert_request(
    notebook: Path, axes: Mapping[str, Axis], fixed: Values, zipped: Sequence[Sequence[str]]
) -> tuple[Known, dict[str, Axis], dict[str, JSON]]:
    """Return declared parameters, and swept and fixed values converted to the declared types.

    The swept values of zipped parameters are returned as one axis (see `grid.zip_axes`).
    """
    for name in axes.keys() & fixed.keys():
        raise InvalidInput(f"{name} is both swept and fixed; give it once")
    declared = parameters.declared(notebook)
    # Names and types are checked before notebook runs are planned. An error about a value is
    # clearer than an error about a notebook run.
    parameters.check_names(notebook, [*axes, *fixed], declared)
    converted = {name: _convert_axis(declared[name], axis) for name, axis in axes.items()}
    converted = grid.zip_axes(converted, zipped)
    for name, axis in converted.items():
        _check_distinct(name, axis)
    return (
        declared,
        converted,
        {name: declared[name].convert(value) for name, value in fixed.items()},
    )


def again(
    notebook: Path, members: Sequence[store.Record], search: Search | None = None
) -> SweepPlan:
    """Return the plan in an earlier sweep's record, validated against the current notebook.

    Raises:
        InvalidInput: The notebook does not accept the recorded values any more.
    """
    known = parameters.declared(notebook)
    described = ((record["folder"], record["values"], record["repeat"]) for record in members)
    return SweepPlan(notebook, [_member(notebook, known, *each) for each in described], search)


def _plan(
    notebook: Path, declared: Known, described: list[Described], swept: list[str]
) -> SweepPlan:
    # Folder numbers have leading zeros. Folders sorted by name are then in the order of the
    # notebook runs.
    digits = max(3, len(str(len(described))))
    members = []
    for number, (values, repeat) in enumerate(described, 1):
        repeat_value = {"repeat": repeat} if "repeat" in swept and "repeat" not in declared else {}
        name_values = {
            name: value for name, value in (values | repeat_value).items() if name in swept
        }
        folder = store.job_name(number, name_values, digits)
        members.append(_member(notebook, declared, folder, values, repeat))
    return SweepPlan(notebook, members)


def _member(
    notebook: Path, declared_parameters: Known, folder: str, values: Values, repeat: int
) -> SweepMember:
    checked = parameters.validate_values(notebook, values, declared_parameters)
    defaults = {name: parameter.default for name, parameter in declared_parameters.items()}
    values_with_defaults = defaults | checked
    workers, threads = (
        parameters.largest(values_with_defaults.get(name)) for name in ("workers", "threads")
    )
    if values_with_defaults.get("clock") == "virtual":
        # On the virtual clock, one process simulates all workers, so the notebook run needs only
        # one process.
        workers = 1
    return SweepMember(
        folder, checked, repeat, workers, threads, known="workers" in declared_parameters
    )


def _convert_axis(parameter: parameters.NotebookParameter, axis: Axis) -> Axis:
    """Convert a parameter's swept values to its type, so that `1` and `1.0` become equal floats."""
    if not isinstance(axis, tuple):
        parameter.convert(axis.low)
        return axis
    return tuple(parameter.convert(value) for value in axis)


def _check_distinct(name: str, axis: Axis) -> None:
    texts = set()
    for text in map(json.dumps, axis if isinstance(axis, tuple) else ()):
        if text in texts:
            raise InvalidInput(
                f"{name} has the value {text} twice; to repeat each run, give --repeats"
            )
        texts.add(text)


def _repeat_values(declared: Known, values: Combination, repeat: int) -> Described:
    """Return the values of a repeat, with a new seed if the notebook has a parameter `seed`."""
    if "seed" not in declared:
        return values, repeat
    first = values.get("seed", declared["seed"].default)
    if type(first) is not int:
        raise InvalidInput(
            f"--repeats increments the parameter seed, but seed={first!r} is not a whole number"
        )
    return values | {"seed": first + repeat}, 0


def _digest(value: JSON) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
