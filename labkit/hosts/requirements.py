"""What a testbed needs of this machine, and the sentence where it is not there."""

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
PMIX = "libpmix.so.2"  # by which `srun --mpi=pmix` makes one world of its tasks
# Where a PATH of a person often does not lead, although they are root.
SYSTEM = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def require(slurm: bool) -> None:
    """Raises: LabkitError, where this machine cannot have a testbed; it says what to do."""
    if sys.platform != "linux":
        raise LabkitError(
            f"a testbed is made of Linux's namespaces, and this is {sys.platform}: "
            "use a Linux machine, or a virtual one or a container with --privileged"
        )
    absent = {name: package for name, package in _wanted(slurm).items() if not found(name)}
    if slurm and not _has_pmix():
        absent[PMIX] = "libpmix2"
    if absent:
        without = "; or do without Slurm: slurm=False, --no-slurm" if slurm else ""
        raise LabkitError(
            f"a testbed needs {', '.join(absent)}, which this machine does not have; on Debian "
            f"and Ubuntu: apt-get install {' '.join(dict.fromkeys(absent.values()))}{without}"
        )
    if os.geteuid() != 0:
        raise LabkitError(
            f"a testbed needs root, to make namespaces, and this is user {os.geteuid()}: "
            "call it through sudo, or as root in a container or virtual machine of your own"
        )


def found(command: str) -> str | None:
    """Where a command is, on PATH or among the system's."""
    return shutil.which(command) or shutil.which(command, path=os.pathsep.join(SYSTEM))


def _wanted(slurm: bool) -> dict[str, str]:
    return COMMANDS | (SLURM if slurm else {})


def pmix_folders() -> list[Path]:
    """Where Debian's PMIx lies, and where its Slurm looks for it."""
    return sorted(path.parent for path in Path("/usr/lib").glob(f"*/pmix2/lib/{PMIX}"))


def _has_pmix() -> bool:
    # Looked for, never loaded: one in this process would stand in the way of the wheel's own.
    return bool(pmix_folders()) or ctypes.util.find_library("pmix") == PMIX
