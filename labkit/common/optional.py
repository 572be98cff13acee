"""Imports of libraries that only labkit's optional extras install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from labkit.common.errors import LabkitError


def optional(module: str, extra: str) -> Any:
    """Import and return a library that one of labkit's extras installs.

    Args:
        module: Name of the module.
        extra: Name of the extra that installs the module.

    Raises:
        LabkitError: The library is not installed; the message contains the command to paste.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise LabkitError(
            f"the package {extra} is not installed; install it: uv sync --inexact --extra "
            f'{extra}   (with pip or conda: pip install --editable ".[{extra}]")'
        ) from error
