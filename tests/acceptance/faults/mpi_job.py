"""An MPI job whose ranks a campaign kills, on this machine or on two hosts."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from labkit.communicator import launcher
from labkit.experiment import Experiment
from labkit.frameworks.namespaces import isolate
from labkit.hosts import Testbed
from labkit.hosts.scripts import AGENT_VARIABLE
from tests.acceptance.repository import EXPORT_PATH

# Names of files; each rank appends its number to the names of its files.
ASKED, BEGUN, STEPS, TOLD = "asked", "begun", "steps", "told"
HANG = 120.0  # seconds per training until all threads print a traceback
START = 300.0  # maximum seconds until all ranks have started


class Ranks:
    """A context manager that starts ranks for training, and ends them.

    Args:
        asked: Experiments that the ranks train in succession, each with the name of its folder.
        bed: Testbed of two hosts; None: this machine.
    """

    def __init__(self, asked: Sequence[tuple[str, Experiment]], bed: Testbed | None) -> None:
        self.size, self._bed = asked[0][1].workers, bed
        self._limit = START + HANG * len(asked)
        # All hosts of the testbed see this folder, but each host has its own temporary folder.
        self._temporary = tempfile.TemporaryDirectory(prefix=".labkit-faults-", dir=Path.cwd())
        self.folder = Path(self._temporary.name)
        (self.folder / ASKED).write_bytes(pickle.dumps(asked))

    def __enter__(self) -> Ranks:
        words = [sys.executable, "-P", "-m", "tests.acceptance.faults.rank", str(self.folder)]
        command, variables = (
            [*launcher.mpiexec(self.size, outlives=True), *EXPORT_PATH],
            os.environ | (launcher.environment(over_hosts=self._bed is not None)),
        )
        if self._bed is None:
            command = [*isolate("mpiexec"), *command, *words]
        else:
            at = ",".join(f"{host}:{-(-self.size // 2)}" for host in self._bed.hosts)
            command += ["--prtemca", "plm", "ssh", "--host", at, *words]
            command = self._bed.command("login", command)
            variables |= {AGENT_VARIABLE: str(self._bed.agent)}
            variables |= {"OMPI_MCA_btl_tcp_if_include": self._bed.network}
        self._said = (self.folder / "said").open("w+")
        self._process = subprocess.Popen(
            command, env=variables, stdout=self._said, stderr=self._said, stdin=subprocess.DEVNULL
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for rank in range(self.size):
            if (process := self._find(rank)) is not None:
                process.kill()
        self._process.wait()
        self._said.close()
        self._temporary.cleanup()

    def wait_for(self, what: Callable[[], bool], seconds: float = START) -> bool:
        """Return whether a condition holds before a timeout and before the ranks end."""
        end = time.monotonic() + seconds
        while not what():
            if self._process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def ended(self) -> bool:
        """Return whether all ranks end in time."""
        try:
            self._process.wait(self._limit)
        except subprocess.TimeoutExpired:
            return False
        return True

    def said(self) -> str:
        """Return the last part of the ranks' output."""
        return " ".join((self.folder / "said").read_text(errors="replace").split())[-600:]

    def kill(self, rank: int) -> float | None:
        """Kill a rank; return the time by the hosts' clock, or None if it had already ended."""
        if (process := self._find(rank)) is None:
            return None
        now = time.monotonic()
        process.kill()
        return now

    def _find(self, rank: int) -> psutil.Process | None:
        """Return the process of a rank on any host."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) not in (process.info["cmdline"] or ()):
                continue
            try:
                if process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                    return process
            except psutil.Error:  # the process has ended meanwhile
                continue
        return None


@contextmanager
def hosts(apart: bool) -> Iterator[Testbed | None]:
    """Yield a testbed of two hosts if the ranks are to be apart; otherwise None (this machine)."""
    if not apart:
        yield None
        return
    from labkit.hosts import testbed

    with testbed(slurm=False) as bed:
        yield bed
