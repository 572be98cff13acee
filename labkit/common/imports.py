"""Import paths, which include a notebook's folder and the working directory of its caller.

Folders with installed modules come first on the import path. A module in a notebook's folder
therefore cannot replace an installed module. Every Python process of labkit starts with the option
-P. Without -P, Python could import modules from another user's working directory.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from labkit.common.errors import LabkitError

# The environment variable LABKIT_MODULES passes the additional import folders to child processes.
VARIABLE = "LABKIT_MODULES"
# A newline separates folder names, because newlines occur in folder names more rarely than colons.
_SEPARATOR = "\n"
_added: list[str] = []


def notebook_folders(notebook: Path) -> str:
    """Return the folders that a notebook imports from, joined by newlines.

    A notebook may import from its own folder, as in JupyterLab. A notebook may also import from the
    caller's working directory, as with papermill.
    """
    return _SEPARATOR.join(dict.fromkeys([str(notebook.resolve().parent), os.getcwd()]))


def split_folders(text: str) -> list[str]:
    """Return the folders in a text that has one folder per line."""
    return [path for path in text.split(_SEPARATOR) if path]


def extra_folders() -> str:
    """Return the additional folders that this process imports from, one per line, or ""."""
    here = os.getcwd()
    # The entry "" of `sys.path` also means the working directory.
    may = any(os.path.realpath(place) == here for place in sys.path)
    return os.environ.get(VARIABLE, here if may else "")


def append_folders(places: str) -> None:
    """Append folders to the import path of this process and of child processes started later.

    Args:
        places: Folders, one per line; they replace the folders that the previous call has appended.
    """
    sys.path[:] = [entry for entry in sys.path if entry not in _added]
    _added[:] = [entry for entry in split_folders(places) if entry not in sys.path]
    sys.path += _added
    os.environ[VARIABLE] = places
    importlib.invalidate_caches()


def append_inherited() -> None:
    """Append the additional import folders that the parent process has set in the environment."""
    append_folders(os.environ.get(VARIABLE, ""))


def optional(module: str, extra: str) -> Any:
    """Import and return a library that belongs to one of labkit's optional extras.

    Args:
        module: Name of the module.
        extra: Name of the extra that installs the module.

    Raises:
        LabkitError: The library is not installed; the message contains the command that installs
            it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise LabkitError(
            f"the package {extra} is not installed; install it: uv sync --inexact --extra "
            f'{extra}   (with pip or conda: pip install --editable ".[{extra}]")'
        ) from error
