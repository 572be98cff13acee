"""Each rank of a world prints its number, the world's size, its host and whether a sum is right."""

from __future__ import annotations

import json
import os
import socket

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
buffer = np.arange(2**18, dtype=np.float64) * (1 + world.rank)  # 2 MiB
world.Allreduce(MPI.IN_PLACE, buffer)
right = np.array_equal(buffer, np.arange(2**18) * sum(range(1, world.size + 1)))
said = [world.rank, world.size, socket.gethostname(), bool(right), os.readlink("/proc/self/ns/net")]
print(json.dumps(said), flush=True)
