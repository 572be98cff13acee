"""Imports of libraries that only the optional extras of the package labkit install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from labkit.common.errors import LabkitError


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
