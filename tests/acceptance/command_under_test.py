"""A real command under attack: its processes by role, its records, and its leftovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.cluster.processes import SESSIONS
from labkit.cluster.run_handle import LAST
from labkit.common.errors import LabkitError
from labkit.jobs.listing import find
from labkit.records import store
from labkit.records.folders import scan

SHARED = Path("/dev/shm")
LIMIT = 150.0  # timeout of each wait, seconds
LEFT = 90.0  # seconds after which no process or file may remain
EXPERIMENT = """
model: linear
dataset_options: {rows: 64, test_rows: 9}
batch_size: 32
verify: false
epochs: 20000
"""
# The source code of a cell or script: its ranks repeatedly wait for each other, and record steps as
# a training does.
CALLS = """
import labkit

def work(communicator):
    import time
    while True:
        communicator.barrier()
        if communicator.rank == 0:
            with open("runs/rank0.jsonl", "a") as file:
                file.write('["step", {}]\\n')
        time.sleep(0.05)

with labkit.Cluster(workers=workers) as cluster:
    cluster.call(work)
"""
NEXT = """
import labkit
with labkit.Cluster(workers=2) as cluster:
    assert cluster.call(lambda communicator: communicator.rank) == [0, 1]
"""


class CommandUnderTest:
    """A running command with its own working folder, runtime folder and shared memory.

    Args:
        kind: The kind `experiment` trains by `labkit run FILE.yaml`. In the kinds `script`,
            `notebook` (`labkit run`) and `sweep`, ranks only wait for each other.
        more: Further arguments of the command line.
        before: Function that the child process calls before it executes the command, for example to
            limit its memory.
        disk: Whether the runs are on a separate, small file system (requires Linux and root).
        ranks: Number of ranks of the cluster.
    """

    def __init__(
        self,
        kind: str,
        more: Sequence[str] = (),
        before: Callable[[], None] | None = None,
        disk: bool = False,
        ranks: int = 2,
    ) -> None:
        # All child processes inherit `LABKIT_RUNTIME`, which identifies the processes of this
        # command.
        self.folder = Path(tempfile.mkdtemp(prefix="labkit-attack-"))
        memory = SHARED if SHARED.is_dir() else self.folder
        self.shared = Path(tempfile.mkdtemp(prefix="labkit-attack-", dir=memory))
        own = {"LABKIT_RUNTIME": str(self.folder), "LABKIT_STATE": str(self.folder)}
        # A forked rank would have the arguments and variables of the process that forks it.
        own["LABKIT_FORK"] = "0"
        own["OMPI_MCA_btl_sm_backing_directory"] = str(self.shared)
        # Open MPI stores files in this folder, whose path identifies the processes of this
        # command's mpiexec.
        self.tmp = self.folder / "tmp"
        self.tmp.mkdir()
        own["TMPDIR"] = str(self.tmp)
        self.environment = {k: v for k, v in os.environ.items() if k != SESSIONS} | own
        self.runs = self.folder / "runs"
        self.runs.mkdir()
        self._mounted = disk
        if disk:
            made = ["mount", "-t", "tmpfs", "-o", "size=1M", "labkit-attack", str(self.runs)]
            subprocess.run(made, check=True)
        (self.folder / "task.yaml").write_text(EXPERIMENT)
        (self.folder / "task.py").write_text(f"workers = {ranks}\n{CALLS}")
        _write_notebook(self.folder / "task.ipynb", ranks)
        self.root = self._start(_command(kind, more), before)

    def _start(
        self, command: Sequence[str], before: Callable[[], None] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / "said.txt").open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-P", *command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=lambda: _begin(before),
            )

    # --- processes -----------------------------------------------------------------------------

    def processes(self) -> dict[psutil.Process, str]:
        """Return the command's running processes, each with its role: `rank 1`, `mpiexec`, …."""
        found = {}
        for process in psutil.process_iter():
            try:
                variables = process.environ()
                if variables.get("LABKIT_RUNTIME") != str(self.folder):
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = self._role(process, variables)
            except psutil.Error:
                continue
        return found

    def _role(self, process: psutil.Process, variables: Mapping[str, str]) -> str:
        line = " ".join(process.cmdline())
        if process.pid == self.root.pid:
            return "command"
        if "labkit.cluster.keeper" in line:
            return "keeper"
        if "prterun" in line or "mpiexec" in line:
            return "mpiexec"
        if "labkit.cluster.engine engine" in line:
            return f"rank {variables.get('OMPI_COMM_WORLD_RANK', '?')}"
        parent = process.parent()
        own = " ".join(parent.cmdline()) if parent else ""
        if "labkit.cluster.engine controller" in line:
            return "controller" if "labkit.cluster.keeper" in own else "part of the controller"
        if "labkit.jobs.job" in line:
            return "kernel" if "labkit.jobs.job" in own else "job"
        return line or "?"

    def send(self, name: str, role: str = "") -> None:
        """Send a signal to all processes with a role; the role "" means all processes."""
        for process, own in self.processes().items():
            if role in ("", own):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.Signals[name])

    # --- output and records --------------------------------------------------------------------

    def said(self) -> str:
        """Return the output of the command so far."""
        return (self.folder / "said.txt").read_text(errors="replace")

    def steps(self) -> int:
        """Return the number of steps that rank 0 has reported."""
        streams = self.runs.rglob("rank0.jsonl")
        return sum(path.read_text().count('["step"') for path in streams)

    def at_work(self) -> bool:
        """Return whether the ranks are training or waiting for each other."""
        return self.steps() > 0

    def records(self) -> list[store.Record]:
        """Return the status records of the command's notebook runs and runs."""
        folders = sorted({*find(self.runs)[0], *scan(self.runs).runs})
        # If labkit cannot write a record beside the run, it writes the record to the runtime
        # folder.
        before = os.environ.get("LABKIT_RUNTIME")
        os.environ["LABKIT_RUNTIME"] = str(self.folder)
        try:
            return [store.read_status(path) for path in folders]
        finally:
            del os.environ["LABKIT_RUNTIME"]
            os.environ |= {"LABKIT_RUNTIME": before} if before is not None else {}

    def told(self) -> str:
        """Return the cause of the command's end, from its records and its last line of output."""
        causes = []
        for record in self.records():
            rank = "" if record["rank"] is None else f"rank {record['rank']}: "
            causes.append(f"{record['state']}: {rank}{record['cause']}")
        return " | ".join([*causes, *self.said().strip().splitlines()[-1:]])

    # --- end -----------------------------------------------------------------------------------

    def ended(self, seconds: float = LIMIT) -> bool:
        """Return whether the command ends before a timeout in seconds."""
        try:
            self.root.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def left(self, seconds: float = LEFT) -> list[str]:
        """Return the processes, segments and files that still exist after some seconds."""
        end = time.monotonic() + seconds
        while True:
            segments = [path.name for path in self.shared.iterdir() if "stale" not in path.name]
            there = sorted([*self.processes().values(), *segments, *self._files()])
            if not there or time.monotonic() > end:
                return there
            time.sleep(0.2)

    def _files(self) -> list[str]:
        """Return the remaining files of clusters and of mpiexec."""
        found = [path for name in ("ompi*", "prte*", "pmix*") for path in self.tmp.glob(name)]
        found += self.folder.glob("labkit-*/clusters/*/*")
        return [path.name for path in found if path.suffix != ".lock" and path.name != LAST]

    def next_works(self) -> bool:
        """Return whether a new cluster of two ranks starts and answers a call."""
        (self.folder / "next.py").write_text(NEXT)
        self.root = self._start(["next.py"])
        return self.ended() and self.root.returncode == 0

    def close(self) -> None:
        """End all remaining processes of the command, and remove its folders."""
        self.send("SIGKILL")
        self.root.wait()
        if self._mounted:
            subprocess.run(["umount", str(self.runs)], check=True)
        for folder in (self.folder, self.shared):
            shutil.rmtree(folder, ignore_errors=True)


def wait_for(what: Callable[[], object], target: CommandUnderTest) -> None:
    """Wait until a condition holds. Raises: LabkitError with the end of the command's output, if
    the condition does not hold in time."""
    end = time.monotonic() + LIMIT
    while not what():
        if target.root.poll() is not None or time.monotonic() > end:
            raise LabkitError(f"the command ended before the attack: {target.said()[-300:]}")
        time.sleep(0.1)


def _begin(before: Callable[[], None] | None) -> None:
    # A shell starts background processes with SIGINT ignored, so the default handler is restored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if before is not None:
        before()


def _command(kind: str, more: Sequence[str]) -> list[str]:
    if kind == "script":
        return ["task.py"]
    files = {"experiment": "run task.yaml", "notebook": "run task.ipynb"}
    cli = ["-c", "from labkit.cli.app import app; app()"]
    return [*cli, *files.get(kind, f"{kind} task.ipynb").split(), *more]


def _write_notebook(path: Path, ranks: int) -> None:
    cells = [(f"workers: int = {ranks}  # ranks", ["parameters"]), (CALLS, [])]
    blank: store.Record = {"cell_type": "code", "execution_count": None, "outputs": []}
    made = [
        blank | {"id": f"c{number}", "source": source, "metadata": {"tags": tags}}
        for number, (source, tags) in enumerate(cells)
    ]
    record = {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(record))
