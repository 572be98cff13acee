"""Run a labkit module, or print package versions, in a Python in which labkit is not installed.

    python foreign.py labkit.frameworks.torch ARGUMENTS…
    python foreign.py --versions torch

The command with a module name, such as `labkit.frameworks.torch`, runs a labkit module. A Python
without labkit can execute foreign.py. The command names the file foreign.py instead of a module of
labkit. The labkit module may import only NumPy and the framework. The option `--versions` prints
the versions of packages, and does not import the packages. With `--versions`, the command fails if
a package is missing.
"""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

VERSIONS = "--versions"


def main() -> None:
    """Register a package `labkit` without its `__init__.py`, and run the requested module."""
    package = ModuleType("labkit")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["labkit"] = package
    # The script removes its own folder from `sys.path`, because its module horovod.py would shadow
    # the package horovod.
    script_folder = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != script_folder]
    if sys.argv[1] == VERSIONS:
        installed = versions(sys.argv[2:])
        sys.exit("not installed") if not installed else print(installed)
    else:
        runpy.run_module(sys.argv.pop(1), run_name="__main__")


def versions(modules: list[str]) -> str:
    """Return versions such as "jax 0.10.2, keras 3.15.1", or "" if a package is missing.

    Args:
        modules: Import names of the packages.
    """
    installed = {module: _version(module) for module in modules}
    return ", ".join(map(" ".join, installed.items())) if all(installed.values()) else ""


def _version(module: str) -> str:
    if find_spec(module) is None:
        return ""
    try:
        return version(module)
    except PackageNotFoundError:
        # A module may belong to a distribution with another name (tensorflow to tensorflow-cpu), or
        # to no distribution.
        names = packages_distributions().get(module)
        return version(names[0]) if names else ""


if __name__ == "__main__":
    main()
