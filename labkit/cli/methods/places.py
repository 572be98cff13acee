"""Where strategies stand in the field's taxonomy: their cells, papers and notebooks; who else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit.cli.methods.method import Family, Method, families
from labkit.cli.methods.trying import trying
from labkit.figures.taxonomy import Standing
from labkit.strategies import AXES, Strategy


@dataclass(frozen=True)
class Placed:
    """A strategy with all of its cells, and the notebooks that try it."""

    method: Method
    notebooks: list[Path]
    kind: type[Strategy]

    def standings(self) -> Iterator[Standing]:
        """One for each of its cells."""
        names = tuple(path.stem for path in self.notebooks)
        for cell in self.kind.cells():
            yield Standing(self.method.name, self.method.cited, names, cell)


def placed(code: Mapping[Path, str]) -> list[Placed]:
    """All strategies, in the order of their families.

    Args:
        code: that of notebooks, by path.
    """
    return [
        Placed(method, trying(family, method, code), kind)
        for family in families()
        for method in family.methods()
        if (kind := _strategy(family, method)) is not None
    ]


def members(axis: str, place: str) -> list[str]:
    """Methods of all families that stand at a place of an axis."""
    every = [method for family in families() for method in family.methods()]
    return [each.name for each in every if place in each.axes.get(axis, ())]


def axes() -> list[tuple[str, list[tuple[str, str, list[str]]]]]:
    """Each axis with its places: the name, what it says, and who stands there."""
    return [
        (axis, [(place, said, members(axis, place)) for place, said in places.items()])
        for axis, places in AXES.items()
    ]


def _strategy(family: Family, method: Method) -> type[Strategy] | None:
    member = family.members[method.name]
    return member if inspect.isclass(member) and issubclass(member, Strategy) else None
