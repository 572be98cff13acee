"""Where modules come from: the folders of a notebook and of its caller hide nothing installed.

Every Python that labkit starts has the option -P: the folder that it stands in may be anybody's.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

# Names the folder of a notebook, and that of its caller, to the processes that work for it.
VARIABLE = "LABKIT_MODULES"
_SEPARATOR = "\n"  # of several folders; a colon stands in the names of some
_added: list[str] = []  # what this process has put on its path


def of_notebook(notebook: Path) -> str:
    """Return the folders that a notebook imports from: its own as in JupyterLab, the caller's as
    by papermill.
    """
    return _SEPARATOR.join(dict.fromkeys([str(notebook.resolve().parent), os.getcwd()]))


def split(places: str) -> list[str]:
    """Return the folders that a text names."""
    return [place for place in places.split(_SEPARATOR) if place]


def folder() -> str:
    """Return the folders whose modules this process imports beside installed ones, or ""."""
    here = os.getcwd()
    may = any(os.path.realpath(place) == here for place in sys.path)  # "" is this folder, too
    return os.environ.get(VARIABLE, here if may else "")


def add(places: str) -> None:
    """Import also from folders, last of all; processes that this one starts hear of them.

    Args:
        places: stand in for the folders before them; "" is none.
    """
    sys.path[:] = [each for each in sys.path if each not in _added]
    _added[:] = [place for place in split(places) if place not in sys.path]
    sys.path += _added
    os.environ[VARIABLE] = places
    importlib.invalidate_caches()


def add_inherited() -> None:
    """Import also from the folders that the process names which has started this one."""
    add(os.environ.get(VARIABLE, ""))
