"""Import paths, which include a notebook's folder, and modules that only labkit's extras install.

Folders with installed modules come first on the import path. A module in a notebook's folder
therefore cannot replace an installed module. Every Python process of labkit starts with the option
-P. Without -P, Python could import modules from another user's working directory.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from labkit.common.errors import LabkitError
from labkit.common.files import DISTRIBUTION

# The environment variable LABKIT_MODULES passes the additional import folders to child processes.
VARIABLE = "LABKIT_MODULES"
# A newline separates folder names, because newlines occur in folder names more rarely than colons.
_SEPARATOR = "\n"
_added: list[str] = []
# `_found` contains the modules that `installed` has found. A module is not searched twice.
_found: dict[str, ModuleSpec] = {}
# The extra of `pyproject.toml` that installs each module. The core installs all other modules.
EXTRA_OF = {
    **dict.fromkeys(("IPython", "anywidget", "ipywidgets"), "widgets"),
    **dict.fromkeys(("tensorflow", "keras", "mpi4py", "ipyparallel", "ml_dtypes"), "train"),
    **dict.fromkeys(("ipykernel", "jupyter_client", "jupyter_core", "jupytext"), "train"),
    **dict.fromkeys(("papermill", "pooch", "sklearn", "zmq"), "train"),
    "jupyterlab": "lab",
    "optuna": "search",
    **dict.fromkeys(("datasets", "PIL"), "datasets"),
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "sphinx": "docs",
}


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


def optional(module: str) -> Any:
    """Import and return a module of a package that one of labkit's extras installs.

    Raises:
        LabkitError: The package is not installed; the message contains the command that installs
            it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (reason := missing(error)) is None:
            raise
        raise reason from error


def require(extra: str) -> None:
    """Check that all packages of an extra are installed, without importing them.

    Raises:
        LabkitError: A package is not installed; the message contains the command that installs it.
    """
    for module, owner in EXTRA_OF.items():
        if owner == extra:
            installed(module)


def installed(module: str) -> ModuleSpec:
    """Return where a module of an extra is installed, without importing it.

    Raises:
        LabkitError: The module is not installed; the message contains the command that installs it.
    """
    hidden = sys.modules.get(module, module) is None  # An import would fail.
    spec = None if hidden else _found.get(module) or find_spec(module)
    if spec is None:
        raise LabkitError(_missing_text(module))
    _found[module] = spec
    return spec


def missing(error: ModuleNotFoundError) -> LabkitError | None:
    """Return the error for a package that one of labkit's extras installs; None for others."""
    module = (error.name or "").partition(".")[0]
    return LabkitError(_missing_text(module)) if module in EXTRA_OF else None


def _missing_text(module: str) -> str:
    extra = EXTRA_OF[module]
    command = f'pip install "{DISTRIBUTION}[{extra}]"'
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():  # in a checkout
        command = (
            f"uv sync --inexact --extra {extra}   (with pip or conda: pip install --editable "
            f'".[{extra}]")'
        )
    return f"the package {module} is not installed; install it: {command}"
