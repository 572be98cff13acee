"""A search for the notebooks whose code uses a method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from labkit.cli.methods.method import Family, Method
from labkit.jobs import cells


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
