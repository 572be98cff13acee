"""Versions of packages in a Python environment, read without importing the packages.

    python foreign.py labkit.frameworks.versions torch

This command also works in a Python in which labkit is not installed. The command prints the
versions, and fails if a package is missing.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec


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
        # A distribution may have another name than its module (tensorflow-cpu), or the module may
        # be a folder without a distribution.
        names = packages_distributions().get(module)
        return version(names[0]) if names else ""


if __name__ == "__main__":
    installed = versions(sys.argv[1:])
    sys.exit("not installed") if not installed else print(installed)
