"""What a run ran on: versions and hardware, without a host, user or path."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from labkit.common.content import JSON


def describe() -> dict[str, JSON]:
    """Versions and hardware as this rank sees them; imports what it names."""
    import keras
    import mpi4py
    import tensorflow as tf
    from mpi4py import MPI

    return machine() | {
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": MPI.Get_library_version().split(",")[0].strip(),
        "threads": os.environ.get("TF_NUM_INTRAOP_THREADS", "unset"),
    }


def machine() -> dict[str, JSON]:
    """What any process may say of its machine, without TensorFlow and MPI."""
    import numpy
    import psutil

    from labkit.common.places import fingerprint

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
