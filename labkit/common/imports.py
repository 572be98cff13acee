"""Where modules come from: a folder beside a notebook adds to what is installed, and hides nothing.

Every Python that labkit starts has the option -P: the folder that it stands in may be anybody's.
"""

from __future__ import annotations

import importlib
import os
import sys

# Names the folder of a notebook, to the processes that work for it.
VARIABLE = "LABKIT_MODULES"
_added: list[str] = []  # what this process has put on its path


def folder() -> str:
    """Return the folder whose modules this process imports beside installed ones, or ""."""
    here = os.getcwd()
    may = any(os.path.realpath(place) == here for place in sys.path)  # "" is this folder, too
    return os.environ.get(VARIABLE, here if may else "")


def add(place: str) -> None:
    """Import also from a folder, last of all; processes that this one starts hear of it.

    Args:
        place: stands in for the folder before it; "" is none.
    """
    sys.path[:] = [each for each in sys.path if each not in _added]
    _added[:] = [place] if place and place not in sys.path else []
    sys.path += _added
    os.environ[VARIABLE] = place
    importlib.invalidate_caches()


def add_inherited() -> None:
    """Import also from the folder that the process names which has started this one."""
    add(os.environ.get(VARIABLE, ""))
