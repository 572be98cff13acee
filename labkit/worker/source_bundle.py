"""What goes with a call to hosts that may not see the folder of who calls: the modules in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from labkit.common import imports

Luggage: TypeAlias = dict[str, bytes]

OWN = __name__.partition(".")[0]  # a package that is at the same place on all hosts
FOLDER = "LABKIT_FOLDER"  # names one that an engine on another host may make, and goes with it


def pack(modules: str) -> Luggage:
    """The sources of the modules and packages in folders, by their paths below these; "": none.

    So a function finds on any host what it imports from beside the notebook, also inside it. Data
    do not travel: ranks look for them where LABKIT_DATA says, or fetch those that labkit knows.
    """
    packed: Luggage = {}
    for folder in map(Path, reversed(imports.split(modules))):  # the first hides the others
        inits = [init for init in folder.glob("*/__init__.py") if init.parent.name != OWN]
        inside = [file for init in inits for file in init.parent.rglob("*.py")]
        # Not all are files that can be read: an editor's locks are links to nowhere.
        files = [file for file in (*folder.glob("*.py"), *inside) if os.access(file, os.R_OK)]
        packed |= {str(f.relative_to(folder)): f.read_bytes() for f in files if f.is_file()}
    return packed


def enter(folder: str, modules: str, luggage: Luggage | None) -> None:
    """Go to the folder of who has called, on a rank, and import what that one imports.

    A host without that folder gives the rank one of its own. Modules come from what has travelled,
    unless those in the host's folder are the same.

    Args:
        folder: of who has called.
        modules: the folders that it imports from; "": none.
        luggage: what has travelled; None: the caller is on this host.
    """
    here = luggage is None
    if luggage and not _has(imports.split(modules), luggage):
        modules = _unpacked(modules, luggage)
    os.chdir(folder if here or os.access(folder, os.R_OK | os.X_OK) else _in_place_of(folder))
    imports.add(modules)


def _has(folders: Sequence[str], luggage: Luggage) -> bool:
    """Whether the first of the folders that has a file of this name has the same, for each."""
    try:
        return all(_first(folders, name).read_bytes() == text for name, text in luggage.items())
    except OSError:
        return False


def _first(folders: Sequence[str], name: str) -> Path:
    found = [file for folder in folders if (file := Path(folder, name)).exists()]
    return found[0] if found else Path(folders[0], name)


def _unpacked(folder: str, luggage: Luggage) -> str:
    own = _in_place_of(folder)
    for name, text in luggage.items():
        file = own / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    return str(own)


@cache
def _in_place_of(folder: str) -> Path:
    return Path(tempfile.mkdtemp(dir=_own()))


@cache
def _own() -> str:
    os.mkdir(os.environ[FOLDER], 0o700)  # which fails where somebody else was quicker
    return os.environ[FOLDER]
