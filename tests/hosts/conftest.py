"""Testbeds, where this machine can have one."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import labkit as lk
from labkit.common.errors import LabkitError
from labkit.communicator import launcher
from labkit.hosts import Testbed
from labkit.hosts.means import require

ROOT = Path(__file__).parents[2]  # all hosts see it


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


@pytest.fixture(scope="session")
def bed(means: None) -> Iterator[Testbed]:
    """Two hosts, a and b, for the whole session: who pulls a cable puts it back."""
    begin = time.monotonic()
    with lk.testbed(cores=3) as up:
        assert time.monotonic() - begin < 60
        yield up


@pytest.fixture(scope="session")
def mpi_environment() -> dict[str, str]:
    """That of ranks, with TCP, without which two hosts have nothing in common."""
    return {k: v for k, v in (os.environ | launcher.environment()).items() if k != "OMPI_MCA_btl"}


@pytest.fixture(scope="session")
def mpirun(
    bed: Testbed, mpi_environment: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as ranks on a:2,b:2, from the login node, with an agent in place of ssh."""
    agent = {"PRTE_MCA_plm_ssh_agent": str(bed.agent)}

    def run(
        command: list[str], ranks: int = 4, options: tuple[str, ...] = (), timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        over = ["--prtemca", "plm", "ssh", "--host", "a:2,b:2", *options]
        whole = [*launcher.mpiexec(ranks), *over, *command]
        return bed.login(whole, env=mpi_environment | agent, cwd=ROOT, timeout=timeout)

    return run
