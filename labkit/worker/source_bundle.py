"""What goes with a call to hosts that may not see the folder of who calls: the modules in it."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TypeAlias

from labkit.common import imports

Luggage: TypeAlias = dict[str, bytes]

OWN = __name__.partition(".")[0]  # a package that is at the same place on all hosts
FOLDER = "LABKIT_FOLDER"  # names one that an engine on another host may make, and goes with it


def pack(modules: str) -> Luggage:
    """The sources of the modules and packages in a folder, by their paths below it; "": none.

    So a function finds on any host what it imports from beside the notebook, also inside it. Data
    do not travel: ranks look for them where LABKIT_DATA says, or fetch those that labkit knows.
    """
    if not modules:
        return {}
    folder = Path(modules)
    inits = [init for init in folder.glob("*/__init__.py") if init.parent.name != OWN]
    inside = [file for init in inits for file in init.parent.rglob("*.py")]
    # Not all are files that can be read: an editor's locks are links to nowhere.
    found = [file for file in (*folder.glob("*.py"), *inside) if os.access(file, os.R_OK)]
    return {str(file.relative_to(folder)): file.read_bytes() for file in found if file.is_file()}


def enter(folder: str, modules: str, luggage: Luggage | None) -> None:
    """Go to the folder of who has called, on a rank, and import what that one imports.

    A host without that folder gives the rank one of its own. Modules come from what has travelled,
    unless those in the host's folder are the same.

    Args:
        folder: of who has called.
        modules: the folder that it imports from; "": none.
        luggage: what has travelled; None: the caller is on this host.
    """
    here = luggage is None
    if luggage and not _has(Path(modules), luggage):
        modules = _unpacked(modules, luggage)
    os.chdir(folder if here or os.access(folder, os.R_OK | os.X_OK) else _in_place_of(folder))
    imports.add(modules)


def _has(folder: Path, luggage: Luggage) -> bool:
    try:
        return all((folder / name).read_bytes() == text for name, text in luggage.items())
    except OSError:
        return False


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
