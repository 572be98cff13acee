"""Fixtures for tests on testbeds, where this machine can run one."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import labkit as lk
from labkit.common.errors import LabkitError
from labkit.communicator import launcher
from labkit.hosts import Testbed
from labkit.hosts.testbed_state import require

Started: TypeAlias = "subprocess.Popen[str]"
ROOT = Path(__file__).parents[2]  # all hosts see this folder


@pytest.fixture(scope="session")
def means() -> None:
    """Skip tests where no testbed can run (in CI, fail), with labkit's or the kernel's reason."""
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
    """Yield two hosts, a and b, for the session; a test that cuts a link must restore it."""
    begin = time.monotonic()
    with lk.testbed(cores=3) as up:
        assert time.monotonic() - begin < 60
        yield up


@pytest.fixture(scope="session")
def mpi_environment() -> dict[str, str]:
    """Return the environment of ranks with TCP enabled: two hosts share no other transport."""
    return {k: v for k, v in (os.environ | launcher.environment()).items() if k != "OMPI_MCA_btl"}


@pytest.fixture(scope="session")
def mpistart(
    bed: Testbed, mpi_environment: dict[str, str]
) -> Callable[..., AbstractContextManager[Started]]:
    """Return a function that starts ranks on a:2,b:2 from the login node, with an agent for ssh.

    Leaving its context early, for example by a failed assertion, ends the ranks.
    """
    environment = mpi_environment | {"PRTE_MCA_plm_ssh_agent": str(bed.agent)}

    @contextmanager
    def start(
        command: list[str], ranks: int = 4, options: tuple[str, ...] = ()
    ) -> Iterator[Started]:
        over = ["--prtemca", "plm", "ssh", "--host", "a:2,b:2", *options]
        words = bed.command("login", [*launcher.mpiexec(ranks), *over, *command])
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(words, text=True, env=environment, cwd=ROOT, **pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    return start


@pytest.fixture(scope="session")
def mpirun(
    mpistart: Callable[..., AbstractContextManager[Started]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that starts ranks on a:2,b:2 and waits for their end."""

    def run(
        command: list[str], timeout: float = 100, **given: Any
    ) -> subprocess.CompletedProcess[str]:
        with mpistart(command, **given) as process:
            said = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, *said)

    return run


@pytest.fixture
def shared_folder(bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that all hosts see, for runs and the ranks' files."""
    kept = ROOT / ".hosts-tests"  # git ignores this folder
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("LABKIT_JOB", folder)
        yield Path(folder)
