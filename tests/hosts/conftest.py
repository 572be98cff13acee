"""Testbeds, where this machine can have one."""

from __future__ import annotations

import os
import subprocess

import pytest

from labkit.common.errors import LabkitError
from labkit.hosts.means import require


@pytest.fixture(scope="session")
def means() -> None:
    """Skips, and in CI fails, where no testbed can be; with labkit's or the kernel's own words."""
    say = pytest.fail if "CI" in os.environ else pytest.skip
    try:
        require(slurm=True)
    except LabkitError as error:
        say(str(error))
    tried = subprocess.run(["unshare", "--net", "--pid", "true"], capture_output=True, text=True)
    if tried.returncode:
        say(f"no namespaces: {tried.stderr.strip()}")
