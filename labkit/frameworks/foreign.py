"""Run a labkit module in a Python in which labkit is not installed.

    python foreign.py labkit.frameworks.ddp ARGUMENTS…

The script is started by its file name. This way, only labkit modules that import nothing but NumPy
and the framework can run.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Register a package `labkit` that skips `labkit/__init__.py`, and run the module."""
    package = ModuleType("labkit")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["labkit"] = package
    # Otherwise, files next to this script would shadow packages such as horovod.
    script_folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != script_folder]
    runpy.run_module(sys.argv.pop(1), run_name="__main__")


if __name__ == "__main__":
    main()
