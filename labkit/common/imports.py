"""Import paths: processes may import from the folders of a notebook and of its caller.

Installed modules come first, so a module in these folders cannot replace an installed module. Every
Python process of labkit starts with Python's option -P, because its working directory may belong to
another user.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

# This environment variable passes the extra folders to child processes.
VARIABLE = "LABKIT_MODULES"
_SEPARATOR = "\n"  # separates folders, whose names may contain a colon
_added: list[str] = []  # folders that this module has added to `sys.path`


def notebook_folders(notebook: Path) -> str:
    """Return the folders that a notebook imports from, joined by newlines.

    JupyterLab uses the notebook's folder, and papermill uses the caller's working directory.
    """
    return _SEPARATOR.join(dict.fromkeys([str(notebook.resolve().parent), os.getcwd()]))


def split_folders(text: str) -> list[str]:
    """Return the folders in a newline-separated text."""
    return [path for path in text.split(_SEPARATOR) if path]


def extra_folders() -> str:
    """Return the extra folders that this process imports from, joined by newlines, or ""."""
    here = os.getcwd()
    # The entry "" of `sys.path` stands for the working directory.
    may = any(os.path.realpath(place) == here for place in sys.path)
    return os.environ.get(VARIABLE, here if may else "")


def append_folders(places: str) -> None:
    """Append folders to the import path of this process and of its future child processes.

    Args:
        places: Newline-separated folders; they replace the folders of the previous call.
    """
    sys.path[:] = [entry for entry in sys.path if entry not in _added]
    _added[:] = [entry for entry in split_folders(places) if entry not in sys.path]
    sys.path += _added
    os.environ[VARIABLE] = places
    importlib.invalidate_caches()


def append_inherited() -> None:
    """Append the import folders that the parent process has passed on in the environment."""
    append_folders(os.environ.get(VARIABLE, ""))
