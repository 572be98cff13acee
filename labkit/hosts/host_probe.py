"""A check that hosts have the same Python, labkit and MPI library as this machine.

python -m labkit.hosts.host_probe prints the versions on the host where it runs
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import LabkitError

LIMIT = 15.0  # Each host must answer within `LIMIT` seconds; all hosts are probed in parallel.
# With the options in `OF_SSH`, ssh asks for no password. ssh also does not wait minutes for a host
# that is down.
OF_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
# The variables MPI4PY_LIBMPI and MPI4PY_MPIABI select the MPI library of mpi4py.
OF_MPI = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")
# A prefix marks the answer of a host, because a login shell may print other lines.
_MARK = "labkit answers: "
# ssh exits with 255 if it cannot connect. A shell exits with 126 or 127 if it cannot run a command.
_NOT_REACHED, _NO_COMMAND = 255, (126, 127)


class PythonInfo(NamedTuple):
    """The versions of labkit and MPI that a Python interpreter uses.

    Attributes:
        labkit: Version of labkit.
        source: SHA-256 of labkit's source.
        mpi: MPI library of mpi4py, such as "Open MPI v5.0.11".
        path: Path of the MPI library; "" if the system does not report it.
    """

    labkit: str
    source: str
    mpi: str
    path: str


class ProbeResult(NamedTuple):
    """The result of probing a host.

    Attributes:
        host: Name of the host.
        trouble: A problem with the host, as a whole sentence; "" if the host is usable.
    """

    host: str
    trouble: str


def probe(names: Sequence[str], agent: Sequence[str]) -> list[ProbeResult]:
    """Check in parallel whether hosts have the same Python, labkit and MPI library as this machine.

    Args:
        names: Names of the hosts.
        agent: Command line of ssh, or of a command with the same arguments.

    Raises:
        LabkitError: The Python of this machine cannot load labkit or MPI.
    """
    local = local_python()
    options = OF_SSH if Path(agent[0]).name == "ssh" else ()
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        troubles = pool.map(lambda name: _trouble(name, [*agent, *options, name], local), names)
        return [ProbeResult(*pair) for pair in zip(names, troubles, strict=True)]


def local_python() -> PythonInfo:
    """Return the versions of labkit and MPI that this Python uses.

    A new process reads the versions, so that this process does not load MPI.

    Raises:
        LabkitError: mpi4py finds no MPI library, or labkit cannot be imported.
    """
    result = _run_probe([], 4 * LIMIT)
    if (info := _parse(result.stdout)) is None:
        raise LabkitError(f"MPI does not start in this Python: {_last(result)}")
    return info


def _trouble(host: str, reach: Sequence[str], local: PythonInfo) -> str:
    try:
        result = _run_probe(reach, LIMIT)
    except subprocess.TimeoutExpired:
        return f"{host} did not answer within {LIMIT:.0f} s"
    except OSError as error:
        return f"{host} cannot be asked: {reach[0]}: {error.strerror}"
    if result.returncode == _NOT_REACHED:
        return f"{host} cannot be reached by {Path(reach[0]).name}: {_last(result)}"
    if result.returncode in _NO_COMMAND:
        return (
            f"{host} has no {sys.executable}; install labkit's Python at the same path on all hosts"
        )
    remote = _parse(result.stdout)
    if remote is None:
        return f"{host} cannot import labkit by {sys.executable}: {_last(result)}"
    if remote.labkit != local.labkit or remote.source != local.source:
        versions = f"{remote.labkit}, but this host has {local.labkit}"
        what = versions if remote.labkit != local.labkit else f"{local.labkit} with another source"
        return f"{host} has labkit {what}; install the same labkit on all hosts"
    if remote.mpi != local.mpi:
        return (
            f"{host} uses {remote.mpi}, but this host uses {local.mpi}; use the same MPI on all "
            "hosts"
        )
    return ""


def _run_probe(reach: Sequence[str], limit: float) -> subprocess.CompletedProcess[str]:
    chosen = [f"{name}={os.environ[name]}" for name in OF_MPI if name in os.environ]
    words = ["env", *chosen, sys.executable, "-P", "-m", "labkit.hosts.host_probe"]
    return subprocess.run(
        # The words of the command become one text, because ssh passes a single command line to a
        # shell.
        [*reach, shlex.join(words)] if reach else words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
    )


def _parse(output: str) -> PythonInfo | None:
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return PythonInfo(*json.loads(lines[-1].removeprefix(_MARK))) if lines else None


def _last(result: subprocess.CompletedProcess[str]) -> str:
    lines = (result.stderr or result.stdout).strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {result.returncode}"


def _describe_python() -> PythonInfo:
    """Return the versions of labkit and MPI that this process uses."""
    import labkit
    from labkit.common.files import fingerprint
    from labkit.communicator import mpi_library

    return PythonInfo(labkit.__version__, fingerprint(), *mpi_library.loaded())


if __name__ == "__main__":
    print(_MARK + json.dumps(_describe_python()))
