"""Start and end of another framework's processes on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from labkit.bench.peers.meeting import Meeting, Record, Task
from labkit.common.errors import LabkitError
from labkit.communicator import launcher
from labkit.frameworks import foreign
from labkit.frameworks.child import FOREIGN, computing, environment
from labkit.frameworks.environments import Installation
from labkit.frameworks.namespaces import private_network
from labkit.frameworks.tf_config import free_ports

START, CASE = 120.0, 300.0  # timeouts in seconds: of the start, and of each case
RANK = [foreign.__file__, "labkit.bench.peers.rank"]


def run(peer: Installation, cases: Sequence[str], workers: int, repeats: int) -> list[Record]:
    """Measure another framework on some benchmark cases, with one thread per process.

    Returns:
        One record per case, with the fields `case` and `version`. `seconds` maps each kind of step
        to its median time in each repeat. `added` maps each kind of step to the time that it adds
        to the local step. `same_weights` tells whether all ranks end with equal weights.

    Raises:
        LabkitError: A process failed or did not end; the message contains the last line of the
            process's output.
    """
    with tempfile.TemporaryDirectory(prefix="labkit-peer-") as name:
        folder = Path(name)
        meeting = folder / "meeting"
        meeting.write_bytes(bytes(Meeting.size_of(workers)))
        task = Task(
            peer=peer.name,
            rank=None,
            size=workers,
            cases=list(cases),
            repeats=repeats,
            meeting=str(meeting),
            ports=free_ports(workers),
        )
        commands = _commands(peer, task)
        variables = _environment(peer)
        with ExitStack() as started:
            inside = started.enter_context(private_network(f"the processes of {peer.name}"))
            processes = [
                started.enter_context(
                    _process([*inside, *command], variables, folder / f"rank{number}")
                )
                for number, command in enumerate(commands)
            ]
            _finish(peer.name, processes, folder, START + CASE * len(cases))
        lines = (folder / "rank0.out").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def _commands(peer: Installation, task: Task) -> list[list[str]]:
    """Return one command per process, or one mpirun command for Horovod."""
    if peer.name != "horovod":
        return [
            [peer.python, *RANK, json.dumps(task | {"rank": rank})] for rank in range(task["size"])
        ]
    rank = [peer.python, *RANK, json.dumps(task)]
    # Horovod's background thread polls MPI. MPI must therefore yield when idle, and each process is
    # bound to a core.
    fits = task["size"] <= (os.cpu_count() or 1)
    place = ("--bind-to", "core") if fits else ("--bind-to", "none", "--oversubscribe")
    mca = ("--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "^tcp")
    return [[_mpirun(peer.python), "-np", str(task["size"]), *place, *mca, *rank]]


def _mpirun(python: str) -> str:
    """Return the mpirun beside the framework's Python, or one on PATH, but never labkit's."""
    own = str(Path(sys.executable).parent)
    places = os.environ.get("PATH", "").split(os.pathsep)
    if python != sys.executable:
        places = [str(Path(python).parent), *(place for place in places if place != own)]
    found = shutil.which("mpirun", path=os.pathsep.join(places))
    if found is None:
        raise LabkitError(
            "Horovod needs the mpirun of the MPI that it was built for; put it on PATH"
        )
    return found


def _environment(peer: Installation) -> dict[str, str]:
    # MPI variables are removed, because with them the framework's ranks would join the MPI job of
    # this process.
    variables = environment(peer.python)
    inherited = {k: v for k, v in variables.items() if not k.startswith(FOREIGN)}
    # As on labkit's ranks, one thread of each process computes, and one thread may wait for
    # messages.
    return (
        inherited
        | computing(1)
        | {
            # Without fusion, two copies are saved; the fastest measured setting.
            "HOROVOD_FUSION_THRESHOLD": "0",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **launcher.huge_pages(),  # labkit's ranks also use huge pages
        }
    )


@contextmanager
def _process(
    command: list[str], variables: dict[str, str], files: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a new session; kill its process group at the end of the context."""
    with _file(files, "out") as out, _file(files, "err") as err:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # mpirun ends its ranks on SIGTERM
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _file(files: Path, ending: str) -> IO[bytes]:
    return files.with_suffix(f".{ending}").open("wb")


def _finish(
    name: str, processes: Sequence[subprocess.Popen[bytes]], folder: Path, limit: float
) -> None:
    """Wait until all processes succeed; raise LabkitError as soon as a process fails."""
    end = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        failed = [number for number, process in enumerate(processes) if process.poll()]
        # Waiting ends at the first failure, because the other processes would wait forever for the
        # failed process.
        if failed or time.monotonic() > end:
            break
        time.sleep(0.1)
    for number, process in enumerate(processes):
        if process.poll():
            lines = (folder / f"rank{number}.err").read_text(errors="replace").splitlines()
            messages = [line for line in lines if re.search("[a-z]", line)]  # skips lines of dashes
            last = messages[-1].strip() if messages else f"exit code {process.returncode}"
            raise LabkitError(f"{name} ended early on rank {number}: {last}")
    if any(process.poll() is None for process in processes):
        raise LabkitError(f"{name} did not end within {limit:.0f} s")
