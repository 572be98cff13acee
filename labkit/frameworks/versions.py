"""Which packages a Python has, in which versions; nothing is imported for it.

    python foreign.py labkit.frameworks.versions torch

prints them of a Python in which labkit is not installed, or fails.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec


def versions(modules: list[str]) -> str:
    """Such as "jax 0.10.2, keras 3.15.1"; empty where one is not installed.

    Args:
        modules: that are imported by these names.
    """
    found = {module: _version(module) for module in modules}
    return ", ".join(map(" ".join, found.items())) if all(found.values()) else ""


def _version(module: str) -> str:
    if find_spec(module) is None:
        return ""
    try:
        return version(module)
    except PackageNotFoundError:
        # Its package has another name, as tensorflow-cpu; or it is but a folder of this name.
        names = packages_distributions().get(module)
        return version(names[0]) if names else ""


if __name__ == "__main__":
    found = versions(sys.argv[1:])
    sys.exit("not installed") if not found else print(found)
