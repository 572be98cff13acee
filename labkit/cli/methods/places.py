"""The taxonomy of strategies: their cells, papers and notebooks, and the values of each axis."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit.cli.methods.method import Family, Method, families
from labkit.figures.taxonomy import MethodInCell
from labkit.jobs import cells
from labkit.strategies import AXES, Strategy


def sources(notebooks: Path) -> dict[Path, str]:
    """Return the code of each notebook in a folder; raise InvalidInput if one is unreadable."""
    code = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        code[path] = "\n".join(cell.source for cell in cells.read(path) if cell.kind == "code")
    return code


def trying(family: Family, method: Method, code: Mapping[Path, str]) -> list[Path]:
    """Return the notebooks that use a method, ordered by descending number of mentions.

    A notebook uses a method if its code contains the method's name, or the name of the mapping of
    the method's family.
    """
    name = re.compile(rf'"{method.name}"' if '"' in family.template else rf"\b{method.name}\b")
    named = {path: len(name.findall(text)) for path, text in code.items()}
    paths = [path for path, text in code.items() if family.place in text or named[path]]
    return sorted(paths, key=lambda path: -named[path])


@dataclass(frozen=True)
class Placed:
    """A strategy: its class, its entry in the list of methods, and notebooks that use it."""

    method: Method
    notebooks: list[Path]
    kind: type[Strategy]

    def standings(self) -> Iterator[MethodInCell]:
        """Yield an entry for each cell of the taxonomy that the strategy's fields allow."""
        names = tuple(path.stem for path in self.notebooks)
        for cell in self.kind.cells():
            yield MethodInCell(self.method.name, self.method.cited, names, cell)


def placed(code: Mapping[Path, str]) -> list[Placed]:
    """Return all strategies, in the order of the families of methods.

    Args:
        code: Source code of each notebook, by path.
    """
    return [
        Placed(method, trying(family, method, code), kind)
        for family in families()
        for method in family.methods()
        if (kind := _strategy(family, method)) is not None
    ]


def members(axis: str, place: str) -> list[str]:
    """Return the names of the methods (of all families) that have the value `place` on an axis."""
    every = [method for family in families() for method in family.methods()]
    return [each.name for each in every if place in each.axes.get(axis, ())]


def axes() -> list[tuple[str, list[tuple[str, str, list[str]]]]]:
    """Return each axis with its values; each value has a name, a description and methods."""
    return [
        (
            axis,
            [(place, description, members(axis, place)) for place, description in places.items()],
        )
        for axis, places in AXES.items()
    ]


def _strategy(family: Family, method: Method) -> type[Strategy] | None:
    member = family.members[method.name]
    return member if inspect.isclass(member) and issubclass(member, Strategy) else None
