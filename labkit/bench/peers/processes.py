"""Starts a peer's processes on this machine, and ends them."""

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
from labkit.frameworks.environments import Found
from labkit.frameworks.private_network import private_network
from labkit.frameworks.tf_config import free_ports

START, CASE = 120.0, 300.0  # seconds: to be up, and for each case
RANK = [foreign.__file__, "labkit.bench.peers.rank"]


def run(peer: Found, cases: Sequence[str], workers: int, repeats: int) -> list[Record]:
    """Measure a peer on these cases, one thread a process.

    Returns:
        A record a case: `case`, `version`, `seconds` (kind of step -> a median a repeat), `added`
        (the same, to the local step), `same_weights`.

    Raises:
        LabkitError: a process failed or did not end; with the last line that it wrote.
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


def _commands(peer: Found, task: Task) -> list[list[str]]:
    """One command a process; Horovod's are started by the mpirun that it was built for."""
    if peer.name != "horovod":
        return [
            [peer.python, *RANK, json.dumps(task | {"rank": rank})] for rank in range(task["size"])
        ]
    rank = [peer.python, *RANK, json.dumps(task)]
    # Its background thread polls MPI: let it yield, and bind each process to a core.
    fits = task["size"] <= (os.cpu_count() or 1)
    place = ("--bind-to", "core") if fits else ("--bind-to", "none", "--oversubscribe")
    mca = ("--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "^tcp")
    return [[_mpirun(peer.python), "-np", str(task["size"]), *place, *mca, *rank]]


def _mpirun(python: str) -> str:
    """That beside the peer's Python; else the system's, not the one that labkit brings along."""
    own = str(Path(sys.executable).parent)
    places = os.environ.get("PATH", "").split(os.pathsep)
    if python != sys.executable:
        places = [str(Path(python).parent), *(place for place in places if place != own)]
    found = shutil.which("mpirun", path=os.pathsep.join(places))
    if found is None:
        raise LabkitError("Horovod wants the mpirun of the MPI it was built for; none is on PATH")
    return found


def _environment(peer: Found) -> dict[str, str]:
    # Under mpirun these would make a peer's ranks believe that they belong to a job of ours.
    given = environment(peer.python)
    kept = {k: v for k, v in given.items() if not k.startswith(FOREIGN)}
    # One thread that computes and one that may wait for a message, as our ranks have them.
    return (
        kept
        | computing(1)
        | {
            "HOROVOD_FUSION_THRESHOLD": "0",  # without two copies; the fastest setting measured
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **launcher.huge_pages(),  # as our ranks have them
        }
    )


@contextmanager
def _process(
    command: list[str], variables: dict[str, str], files: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is ended with everything that it started."""
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
            process.terminate()  # mpirun then ends its ranks
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
    """Wait until all have ended well; raise as soon as one has not."""
    end = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        failed = [number for number, process in enumerate(processes) if process.poll()]
        # One that failed leaves the others waiting for it.
        if failed or time.monotonic() > end:
            break
        time.sleep(0.1)
    for number, process in enumerate(processes):
        if process.poll():
            said = (folder / f"rank{number}.err").read_text(errors="replace").splitlines()
            words = [line for line in said if re.search("[a-z]", line)]  # mpirun draws rules
            last = words[-1].strip() if words else f"exit code {process.returncode}"
            raise LabkitError(f"{name} ended early on rank {number}: {last}")
    if any(process.poll() is None for process in processes):
        raise LabkitError(f"{name} did not end within {limit:.0f} s")
