"""Compiled Python of the processes that labkit starts, where the shell has Python keep none."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from labkit.common.places import cache_folder


def kept() -> dict[str, str]:
    """Variables with which started processes find what earlier ones have compiled.

    Containers often set PYTHONDONTWRITEBYTECODE. Each engine would then compile TensorFlow anew
    and take three times as long to start. What is compiled is kept in labkit's own cache: nothing
    is written beside anybody's sources. Nothing is set where Python keeps what it compiles, where
    a folder for it is set already, or where what labkit needs was compiled when it was installed.
    """
    chosen = sys.pycache_prefix or "PYTHONPYCACHEPREFIX" in os.environ
    if not sys.dont_write_bytecode or chosen or _is_compiled("ipyparallel"):
        return {}
    return {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(cache_folder("bytecode")),
    }


def keep() -> None:
    """Set these variables for all processes that this one starts from now on."""
    os.environ.update(kept())


def _is_compiled(package: str) -> bool:
    spec = find_spec(package)
    source = spec.origin if spec else None
    return source is not None and Path(cache_from_source(source)).exists()
