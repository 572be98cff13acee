"""Libraries that only labkit's extras bring."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from labkit.common.errors import LabkitError


def optional(module: str, extra: str) -> Any:
    """A library that only one of labkit's extras brings.

    Raises: LabkitError, with the line to paste, where it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise LabkitError(
            f"{extra} is not installed; paste: uv sync --inexact --extra {extra}   "
            f'(with pip or conda: pip install --editable ".[{extra}]")'
        ) from error
