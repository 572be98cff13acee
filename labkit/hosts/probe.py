"""What a host answers when it is asked for this Python, its labkit and its MPI, in one go.

python -m labkit.hosts.probe    says it of the host where it runs
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

LIMIT = 15.0  # seconds for each host; all are asked at once
# Nobody is there to type a password, and a host that is down shall not take minutes.
OF_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
OF_MPI = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")  # by which a person chooses a site's library
_MARK = "labkit answers: "  # a login shell may say something before
_NOT_REACHED, _NO_COMMAND = 255, (126, 127)  # exit codes of ssh, and of shells


class Known(NamedTuple):
    """What is known of a Python.

    Attributes:
        labkit: its version.
        source: the checksum of its source.
        mpi: the library that mpi4py works with, such as "Open MPI v5.0.11".
        path: of that library; "" where the system does not tell.
    """

    labkit: str
    source: str
    mpi: str
    path: str


class Answer(NamedTuple):
    """What came of asking a host.

    Attributes:
        host: its name.
        trouble: "" when all is well; else a whole sentence.
    """

    host: str
    trouble: str


def probe(names: Sequence[str], agent: Sequence[str]) -> list[Answer]:
    """Ask hosts, all at once, whether they have this Python with the same labkit and the same MPI.

    Args:
        names: of the hosts.
        agent: the words of ssh, or of a command that takes its words.

    Raises:
        LabkitError: this host does not know it of itself.
    """
    own = here()
    options = OF_SSH if Path(agent[0]).name == "ssh" else ()
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        troubles = pool.map(lambda name: _trouble(name, [*agent, *options, name], own), names)
        return [Answer(*each) for each in zip(names, troubles, strict=True)]


def here() -> Known:
    """What is known of this Python, asked in a fresh process: this one may not load MPI.

    Raises:
        LabkitError: mpi4py finds no library, or labkit cannot be imported.
    """
    done = _ask([], 4 * LIMIT)
    if (known := _known(done.stdout)) is None:
        raise LabkitError(f"this Python does not start MPI: {_last(done)}")
    return known


def _trouble(host: str, reach: Sequence[str], own: Known) -> str:
    try:
        done = _ask(reach, LIMIT)
    except subprocess.TimeoutExpired:
        return f"{host} did not answer within {LIMIT:.0f} s"
    except OSError as error:
        return f"{host} cannot be asked: {reach[0]}: {error.strerror}"
    if done.returncode == _NOT_REACHED:
        return f"{host} cannot be reached by {Path(reach[0]).name}: {_last(done)}"
    if done.returncode in _NO_COMMAND:
        return f"{host} has no {sys.executable}: labkit's Python must be at the same path there"
    there = _known(done.stdout)
    if there is None:
        return f"{host} cannot import labkit by {sys.executable}: {_last(done)}"
    if there.labkit != own.labkit or there.source != own.source:
        versions = f"{there.labkit}, and this is {own.labkit}"
        what = versions if there.labkit != own.labkit else f"{own.labkit} from another source"
        return f"{host} has labkit {what}: install the same on all hosts"
    if there.mpi != own.mpi:
        return f"{host} works with {there.mpi}, and this host with {own.mpi}: use one on all hosts"
    return ""


def _ask(reach: Sequence[str], limit: float) -> subprocess.CompletedProcess[str]:
    chosen = [f"{name}={os.environ[name]}" for name in OF_MPI if name in os.environ]
    words = ["env", *chosen, sys.executable, "-P", "-m", "labkit.hosts.probe"]
    return subprocess.run(
        # ssh hands one line to a shell.
        [*reach, shlex.join(words)] if reach else words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
    )


def _known(said: str) -> Known | None:
    told = [line for line in said.splitlines() if line.startswith(_MARK)]
    return Known(*json.loads(told[-1].removeprefix(_MARK))) if told else None


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {done.returncode}"


def _tell() -> Known:
    """What this process knows of its own Python."""
    import mpi4py

    import labkit
    from labkit.common.paths import fingerprint

    # Asked for its name, a library need not start; some cannot outside of an allocation.
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    maps = Path("/proc/self/maps")
    loaded = [line.split()[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    path = next((each for each in loaded if Path(each).name.startswith("libmpi.")), "")
    return Known(
        labkit.__version__, fingerprint(), MPI.Get_library_version().split(",")[0].strip(), path
    )


if __name__ == "__main__":
    print(_MARK + json.dumps(_tell()))
