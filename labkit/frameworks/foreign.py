"""A module of labkit's, run by a Python in which labkit is not installed.

    python foreign.py labkit.frameworks.ddp ARGUMENTS…

Started by file name. Of labkit only modules that need no more than NumPy and the framework can be
imported so.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Let `labkit.…` be imported without what `labkit/__init__.py` brings along; run the module."""
    package = ModuleType("labkit")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["labkit"] = package
    own = str(Path(__file__).resolve().parent)  # its modules must not stand for horovod and others
    sys.path[:] = [place for place in sys.path if place != own]
    runpy.run_module(sys.argv.pop(1), run_name="__main__")


if __name__ == "__main__":
    main()
