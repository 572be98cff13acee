"""The MPI library's own allreduce, beside those that labkit executes itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.communicator.traffic import Traffic


def library_allreduce(comm: Any, flat: np.ndarray, traffic: Traffic) -> None:
    """Sum in place, by whatever the library chooses; 16-bit floats by way of float32.

    The library does not say what it sent: the least that any allreduce must send per rank
    (Patarasuk & Yuan 2009) stands for it.
    """
    from mpi4py import MPI

    if flat.dtype.itemsize == 2:
        wide = flat.astype(np.float32)
        comm.Allreduce(MPI.IN_PLACE, wide)
        flat[...] = wide.astype(flat.dtype)
    else:
        comm.Allreduce(MPI.IN_PLACE, flat)
    traffic.messages += 1
    traffic.wire_bytes += 2 * (comm.size - 1) * flat.nbytes // comm.size
