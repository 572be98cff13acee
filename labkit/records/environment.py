"""The environment of a run: versions and hardware, but no names of hosts, users or paths."""

from __future__ import annotations

import os

from labkit.common import keras_settings
from labkit.common.canonical_json import JSON
from labkit.common.machine import machine


def describe() -> dict[str, JSON]:
    """Return the versions and hardware that this rank sees; imports TensorFlow and MPI."""
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
        **({"keras_settings": changes} if (changes := keras_settings.changed()) else {}),
        "threads": os.environ.get("TF_NUM_INTRAOP_THREADS", "unset"),
    }
