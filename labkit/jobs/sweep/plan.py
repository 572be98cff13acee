"""What a sweep runs: its members in order, all checked before the first one starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from labkit.common.errors import InvalidInput
from labkit.common.paths import fingerprint
from labkit.jobs import cells, parameters
from labkit.jobs.parameters import Known, Values
from labkit.jobs.sweep import grid
from labkit.jobs.sweep.grid import LARGEST, Axis, Combination, Draw, from_text, from_yaml
from labkit.jobs.sweep.search import Search
from labkit.records import store

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON

Described: TypeAlias = tuple[Combination, int]  # values, and which of several with the same


@dataclass(frozen=True)
class Member:
    """One notebook with one set of values.

    Attributes:
        folder: the name of its job's folder.
        values: its parameters, of the types that the notebook declares.
        repeat: which of several with the same values.
        workers, threads: the largest that it asks for; 1 where the notebook has no such parameter.
        known: whether the notebook has a parameter `workers`; else only it knows its ranks.
    """

    folder: str
    values: dict[str, JSON]
    repeat: int
    workers: int
    threads: int
    known: bool = True

    @property
    def cores(self) -> int | None:
        """Ranks × threads; None where nobody knows before it runs."""
        return self.workers * self.threads if self.known else None

    @property
    def shape(self) -> tuple[int, int]:
        """What a cluster must have to be of use to it."""
        return self.workers, self.threads


@dataclass(frozen=True)
class Plan:
    """The members of a sweep over a notebook; those of a search as far as they were asked."""

    notebook: Path
    members: list[Member]
    search: Search | None = None  # by which members are added while it runs

    @property
    def name(self) -> str:
        """The hash of what is asked, whatever the notebook and labkit contain by now."""
        asked: JSON = [[member.values, member.repeat] for member in self.members]
        if self.search is not None:
            asked = self.search.to_json()
        # Not the notebook's content: `--resume` finds a sweep again whose notebook was mended.
        return _digest([store.shown_path(self.notebook), asked])

    @cached_property
    def text(self) -> str:
        """The notebook as the sweep finds it: members execute this, whatever comes after."""
        return cells.text(self.notebook)

    @cached_property
    def _code(self) -> list[JSON]:
        """What results depend on: the notebook's code, and labkit's. Outputs and prose do not."""
        # Prose and outputs may change, and what has completed stays.
        code: list[JSON] = [
            [cell.source, [*cell.tags]]
            for cell in cells.parse(self.text, self.notebook)
            if cell.kind == "code"
        ]
        return [code, fingerprint()]

    def content(self, member: Member) -> str:
        """The hash of what a member computes from: the notebook, its values, labkit's source."""
        return _digest([self._code, member.values, member.repeat])


@dataclass(frozen=True)
class SweepSpec:
    """A sweep as a person words it: axes, fixed values, and how many draws."""

    # Apart from Plan: this is checked against a notebook, and a Plan holds only what has passed.

    axes: dict[str, Axis]
    fixed: Values
    random: int | None = None
    seed: int = 0
    repeats: int = 1


def read_assignments(texts: tuple[str, ...]) -> dict[str, Axis]:
    """The axes of a command line's `name=values`.

    Raises:
        InvalidInput: a text without a name or values, a name given twice.
    """
    axes: dict[str, Axis] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise InvalidInput(f"{text!r} is not name=a,b,c nor name=range(1,5)")
        if name in axes:
            raise InvalidInput(f"{name} is given twice; give all its values at once")
        axes[name] = from_text(name, values)
    return axes


def read_file(text: str, origin: str) -> tuple[dict[str, Axis], dict[str, int]]:
    """The axes of a sweep file, and its `random` (`samples`, `seed`), if it has one.

    Raises:
        InvalidInput: not YAML of `name: values`, or a `random` that is something else.
    """
    record = parameters.read_yaml(text, origin)
    drawn = record.pop("random", {})
    if type(drawn) is int:
        drawn = {"samples": drawn}
    given = drawn if isinstance(drawn, dict) else {"": drawn}
    known = {name: given[name] for name in given.keys() & {"samples", "seed"}}
    numbers = {name: number for name, number in known.items() if type(number) is int}
    if len(numbers) < len(given):
        raise InvalidInput(f"{origin}: random: {drawn!r} is not a number, nor samples and seed")
    return {name: from_yaml(name, value) for name, value in record.items()}, numbers


def make_search(notebook: Path, axes: Mapping[str, Axis], given: Search) -> tuple[Plan, int]:
    """The plan of a search, yet without members, and the most ranks that one may ask for.

    Raises:
        InvalidInput: an unknown name, an impossible value, no axis.
    """
    if not axes:
        raise InvalidInput("nothing to search over: give name=a,b,c or name=uniform(0,1)")
    known, axes, fixed = _checked(notebook, axes, given.fixed)
    ends = {name: [a.low, a.high] if isinstance(a, Draw) else [*a] for name, a in axes.items()}
    first = {name: values[0] for name, values in ends.items()} | fixed
    # Each value beside the first of all others, as `parameters.check_fields` has it.
    probes = [first | {name: value} for name, values in ends.items() for value in values]
    members = [_member(notebook, known, "", values, 0) for values in probes]
    found = Plan(notebook, [], replace(given, axes=axes, fixed=fixed))
    return found, max(member.workers for member in members)


def next_member(found: Plan, number: int, chosen: Combination, fixed: Values) -> Member:
    """A member of a search, checked as all are."""
    known = parameters.declared(found.notebook)
    folder = store.job_name(number, chosen)
    return _member(found.notebook, known, folder, {**chosen, **fixed}, 0)


def make(notebook: Path, asked: SweepSpec) -> Plan:
    """The plan of a sweep, every member's values checked as `labkit run` checks them.

    With repeats, the notebook's parameter `seed` counts up from its value; where there is none,
    members repeat with the same values.

    Raises:
        InvalidInput: an unknown name, an impossible value, no combination or too many.
    """
    if asked.repeats < 1:
        raise InvalidInput(f"--repeats {asked.repeats} is impossible; give a whole number from 1")
    known, axes, fixed = _checked(notebook, asked.axes, asked.fixed)
    if asked.random is None:
        combinations = grid.every(axes)
    else:
        combinations = grid.some(axes, asked.random, asked.seed)
    if len(combinations) * asked.repeats > LARGEST:
        raise InvalidInput(
            f"{len(combinations):,} combinations × {asked.repeats} repeats are more than a sweep "
            f"takes ({LARGEST:,})"
        )
    swept = [name for name, axis in axes.items() if not isinstance(axis, tuple) or len(axis) > 1]
    if asked.repeats > 1 and "seed" in swept:
        raise InvalidInput("--repeats counts up the parameter seed, which is swept itself")
    described = [
        ({**combination, **fixed}, repeat)
        for combination in combinations
        for repeat in range(asked.repeats)
    ]
    if asked.repeats > 1:
        described = [_repeated(known, values, repeat) for values, repeat in described]
        swept.append("seed" if "seed" in known else "repeat")
    return _plan(notebook, known, described, swept)


def _checked(
    notebook: Path, axes: Mapping[str, Axis], fixed: Values
) -> tuple[Known, dict[str, Axis], dict[str, JSON]]:
    """What the notebook declares, and what is asked as it declares it."""
    for name in axes.keys() & fixed.keys():
        raise InvalidInput(f"{name} is both swept and fixed; give it once")
    known = parameters.declared(notebook)
    # First the names, and the types of each list: a sentence on a value is better than on a member.
    parameters.check_names(notebook, [*axes, *fixed], known)
    converted = {name: _converted(known[name], axis) for name, axis in axes.items()}
    return known, converted, {name: known[name].convert(value) for name, value in fixed.items()}


def again(notebook: Path, members: Sequence[store.Record], search: Search | None = None) -> Plan:
    """The plan of an earlier sweep's record, checked by the notebook as it is now.

    Raises:
        InvalidInput: the notebook does not take these values any more.
    """
    known = parameters.declared(notebook)
    described = ((record["folder"], record["values"], record["repeat"]) for record in members)
    return Plan(notebook, [_member(notebook, known, *each) for each in described], search)


def _plan(notebook: Path, known: Known, described: list[Described], swept: list[str]) -> Plan:
    # So many digits that folders sort by name as members do by number.
    digits = max(3, len(str(len(described))))
    members = []
    for number, (values, repeat) in enumerate(described, 1):
        named = {"repeat": repeat} if "repeat" in swept and "repeat" not in known else {}
        words = {name: value for name, value in (values | named).items() if name in swept}
        folder = store.job_name(number, words, digits)
        members.append(_member(notebook, known, folder, values, repeat))
    return Plan(notebook, members)


def _member(notebook: Path, known: Known, folder: str, values: Values, repeat: int) -> Member:
    checked = parameters.check(notebook, values, known)
    declared = {name: parameter.default for name, parameter in known.items()}
    asked = declared | checked
    workers, threads = (parameters.largest(asked.get(name)) for name in ("workers", "threads"))
    if asked.get("clock") == "virtual":
        workers = 1  # one process plays them all
    return Member(folder, checked, repeat, workers, threads, known="workers" in known)


def _converted(parameter: parameters.Parameter, axis: Axis) -> Axis:
    """The values as the notebook declares them, so that `1` and `1.0` are seen to be one float."""
    if not isinstance(axis, tuple):
        parameter.convert(axis.low)
        return axis
    values = tuple(parameter.convert(value) for value in axis)
    seen = set()
    for text in map(json.dumps, values):
        if text in seen:
            raise InvalidInput(
                f"{parameter.name} has {text} twice; --repeats runs members several times"
            )
        seen.add(text)
    return values


def _repeated(known: Known, values: Combination, repeat: int) -> Described:
    """The values of one repeat: with a seed of its own where the notebook has one."""
    if "seed" not in known:
        return values, repeat
    first = values.get("seed", known["seed"].default)
    if type(first) is not int:
        raise InvalidInput(f"--repeats counts up the parameter seed, but {first!r} is no number")
    return values | {"seed": first + repeat}, 0


def _digest(value: JSON) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
