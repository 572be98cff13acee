"""Run a labkit module in a Python in which labkit is not installed.

    python foreign.py labkit.frameworks.ddp ARGUMENTS…

The command starts this script by its file name, not as a module of labkit. In this way, a labkit
module can run if it imports only NumPy and the framework.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Register a package `labkit` without its `__init__.py`, and run the requested module."""
    package = ModuleType("labkit")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["labkit"] = package
    # The script's folder is removed from the path, because its files would shadow packages such as
    # horovod.
    script_folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != script_folder]
    runpy.run_module(sys.argv.pop(1), run_name="__main__")


if __name__ == "__main__":
    main()
