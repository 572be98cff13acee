"""The notebooks that try a method, by what their code says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from labkit.cli.methods.method import Family, Method
from labkit.jobs import cells


def sources(notebooks: Path) -> dict[Path, str]:
    """The code of each notebook of a folder; raises InvalidInput where one cannot be read."""
    found = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        found[path] = "\n".join(cell.source for cell in cells.read(path) if cell.kind == "code")
    return found


def trying(family: Family, method: Method, code: Mapping[Path, str]) -> list[Path]:
    """The notebooks that try a method: a parameter takes any of its family, or code names it.

    The one that names it most often comes first.
    """
    name = re.compile(rf'"{method.name}"' if '"' in family.say else rf"\b{method.name}\b")
    named = {path: len(name.findall(text)) for path, text in code.items()}
    paths = [path for path, text in code.items() if family.place in text or named[path]]
    return sorted(paths, key=lambda path: -named[path])
