"""The commands, libraries and rights that a testbed needs, and errors if they are missing."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from pathlib import Path

from labkit.common.errors import LabkitError

COMMANDS = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
    "mount": "mount",
}
SLURM = dict.fromkeys(("slurmctld", "slurmd", "srun", "sinfo"), "slurm-wlm")
PMIX = "libpmix.so.2"  # library that joins all tasks of `srun --mpi=pmix` in one MPI_COMM_WORLD
# The system folders in `SYSTEM` are often not in PATH, even for root.
SYSTEM = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def require(slurm: bool) -> None:
    """Raise an error if this machine cannot run a testbed.

    Args:
        slurm: Whether the testbed runs Slurm.

    Raises:
        LabkitError: A requirement is missing; the message says what to install or do.
    """
    if sys.platform != "linux":
        raise LabkitError(
            f"a testbed needs Linux namespaces, but this system is {sys.platform}; "
            "use a Linux machine, a virtual machine, or a container with --privileged"
        )
    absent = {name: package for name, package in _wanted(slurm).items() if not find_command(name)}
    if slurm and not _has_pmix():
        absent[PMIX] = "libpmix2"
    if absent:
        without = "; or start a testbed without Slurm (slurm=False, --no-slurm)" if slurm else ""
        raise LabkitError(
            f"a testbed needs {', '.join(absent)}, which this machine does not have; on Debian "
            f"and Ubuntu, run apt-get install {' '.join(dict.fromkeys(absent.values()))}{without}"
        )
    if os.geteuid() != 0:
        raise LabkitError(
            f"a testbed needs root to create namespaces, but this is user {os.geteuid()}; "
            "start it with sudo, or as root in a container or virtual machine of your own"
        )


def find_command(command: str) -> str | None:
    """Return the path of a command in PATH or in the system folders; None if it is missing."""
    return shutil.which(command) or shutil.which(command, path=os.pathsep.join(SYSTEM))


def _wanted(slurm: bool) -> dict[str, str]:
    return COMMANDS | (SLURM if slurm else {})


def pmix_folders() -> list[Path]:
    """Return the folders in which Debian's Slurm searches for Debian's PMIx library."""
    return sorted(path.parent for path in Path("/usr/lib").glob(f"*/pmix2/lib/{PMIX}"))


def _has_pmix() -> bool:
    # `find_library` finds the library without loading it; a loaded library would conflict with the
    # PMIx of Open MPI's Python package.
    return bool(pmix_folders()) or ctypes.util.find_library("pmix") == PMIX
