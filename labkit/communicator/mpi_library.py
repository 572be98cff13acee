"""The MPI library that mpi4py loads, its name, and the mpiexec that belongs to it.

python mpi_library.py prints the library that mpi4py loads in a new process
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import LabkitError

# The constant LIMIT is a timeout in seconds for the process that loads the MPI library.
LIMIT = 60.0
# Variables with these prefixes select another MPI library than the one beside Python.
_SELECTING = ("MPI4PY_", "LD_", "DYLD_")
_LIBRARIES = ("libmpi.so.*", "libmpi.*.dylib")
# Each pattern finds an MPI implementation in its version text. The texts come from
# `MPI_Get_library_version` and from `mpiexec --version`. OpenRTE is the launcher of Open MPI 4, and
# Hydra is the launcher of MPICH.
_NAMES = {"Open MPI": "Open MPI|OpenRTE", "Intel MPI": "Intel", "MPICH": "MPICH|HYDRA"}
# Debian installs the commands of several MPI libraries in one folder, with these names.
_COMMANDS = {
    "Open MPI": ("mpiexec.openmpi", "mpiexec"),
    "MPICH": ("mpiexec.mpich", "mpiexec.hydra", "mpiexec"),
}


class Library(NamedTuple):
    """An MPI library.

    Attributes:
        name: Name and version, such as "Open MPI v5.0.11".
        path: Path of the library; "" if the system does not report it.
    """

    name: str
    path: str

    @property
    def is_open_mpi(self) -> bool:
        """Whether the library is Open MPI."""
        return self.name.startswith("Open MPI")

    @property
    def mpiexec(self) -> Path | None:
        """The mpiexec that is installed beside the library; None if there is no such command.

        A library lies in a folder `lib` or `lib64`, or in a subfolder. The commands lie in a folder
        `bin` beside it.
        """
        names = _COMMANDS.get(self.name.split(" v")[0], ("mpiexec",))
        folders = Path(self.path).parents
        prefixes = (folder.parent for folder in folders if folder.name in ("lib", "lib64"))
        commands = (prefix / "bin" / name for prefix in prefixes for name in names)
        return next(filter(Path.is_file, commands), None)


def implementation(text: str) -> str:
    """Return the name and version of an MPI implementation, such as "Open MPI v5.0.11".

    Args:
        text: The version text of an MPI library or of an mpiexec.
    """
    version = re.search(r"\d+\.[\w.]+", text)
    for name, pattern in _NAMES.items():
        if version and re.search(pattern, text):
            return f"{name} v{version[0]}"
    return " ".join(text.split("\n")[0].split(",")[0].split())


def implementation_of(command: str) -> str:
    """Return the name and version of an mpiexec; "" if the command cannot run.

    Raises:
        LabkitError: The command prints no version within LIMIT seconds.
    """
    try:
        result = _run([command, "--version"])
    except subprocess.TimeoutExpired as error:
        raise LabkitError(f"{command} --version did not end within {LIMIT:.0f} s") from error
    return implementation(result.stdout or result.stderr) if result else ""


def same_family(first: str, second: str) -> bool:
    """Return whether two names denote one MPI implementation, or a name denotes none."""
    families = {name.split(" v")[0] for name in (first, second)}
    return len(families) == 1 or not families <= _NAMES.keys()


def loaded() -> Library:
    """Return the MPI library that this process has loaded, and load it if necessary."""
    import mpi4py

    # An MPI library reports its version even before `MPI_Init`. In some MPI libraries, `MPI_Init`
    # fails outside of an MPI job.
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    maps = Path("/proc/self/maps")
    files = [line.split()[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    path = next((file for file in files if re.match(r"libmpi(ch)?\.", Path(file).name)), "")
    return Library(implementation(MPI.Get_library_version()), path)


def find() -> Library | None:
    """Return the MPI library that mpi4py loads in a new process; None if it loads no library.

    No process is started if mpi4py's wheel and only Open MPI are installed in the environment of
    this Python, and no variable selects another library.
    """
    libraries = [path for name in _LIBRARIES for path in Path(sys.prefix).glob(f"lib/{name}")]
    bundled = [path for path in libraries if re.search(r"\.40\b", path.name)]
    selecting = tuple(item for item in os.environ.items() if item[0].startswith(_SELECTING))
    if bundled and bundled == libraries and _wheel() and not selecting:
        return Library("Open MPI", str(bundled[0]))
    return _probe(sys.executable, selecting)


def _wheel() -> bool:
    """Return whether mpi4py is the wheel, which searches the MPI library in Python's environment.

    The wheel contains a module for each MPI library. Other builds are linked to one library.
    """
    folders = (Path(entry, "mpi4py") for entry in sys.path)
    folder = next(filter(Path.is_dir, folders), Path())
    return Path(sys.prefix) in folder.parents and any(folder.glob("MPI.openmpi.*"))


@cache
def _probe(python: str, selecting: tuple[tuple[str, str], ...]) -> Library | None:
    """Load the library in a new process, whose environment contains the variables `selecting`."""
    result = _run([python, "-P", __file__])
    return Library(*json.loads(result.stdout)) if result and not result.returncode else None


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command and capture its output; return None if the command cannot be executed."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except OSError:
        return None


if __name__ == "__main__":
    print(json.dumps(loaded()))
