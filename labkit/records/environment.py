"""What a run ran on: versions and hardware, without a host, user or path."""

from __future__ import annotations

import os

from labkit.common.canonical_json import JSON
from labkit.common.machine import machine


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
