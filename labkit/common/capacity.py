"""The number of MPI ranks that the memory and the cores of this machine allow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.common.paths import usable_cores
from labkit.common.units import plural

# Resident memory in GiB of a rank that has imported TensorFlow and built a small model. `RANK_GIB`
# was measured with TensorFlow 2.21, Keras 3, Linux and one thread.
RANK_GIB = 0.7
RANKS_PER_CORE = 8
# The option --force of a command sets the environment variable LABKIT_OVERSUBSCRIBE.
OVERSUBSCRIBE = "LABKIT_OVERSUBSCRIBE"
# The memory limit of a container is in `memory.max` for version 2 of cgroups, and in
# `memory.limit_in_bytes` for version 1.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


class Capacity(NamedTuple):
    """Cores and memory of a machine.

    Attributes:
        cores: Number of cores that this process may use.
        free: Free memory in GiB.
        total: Total memory in GiB.
    """

    cores: int
    free: float
    total: float

    @property
    def max_ranks(self) -> int:
        """Maximum number of ranks that fit into the total memory; at least 1."""
        return max(1, int(self.total / RANK_GIB))


def capacity(groups: Path = Path("/sys/fs/cgroup")) -> Capacity:
    """Return the capacity of this machine, or of the container if the container limits it.

    Args:
        groups: Folder of the cgroup file system.
    """
    import psutil

    memory = psutil.virtual_memory()
    limits = [float(memory.total)]
    for path in map(groups.joinpath, _LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdecimal():
            limits.append(float(text))
    total = min(limits)
    return Capacity(usable_cores(), min(memory.available, total) / 2**30, total / 2**30)


def check_ranks(ranks: int, oversubscribe: bool = False, machine: Capacity | None = None) -> None:
    """Raise an error if this machine's memory or cores do not suffice for a number of ranks.

    Args:
        ranks: Number of ranks to start on this machine.
        oversubscribe: Whether the ranks may exceed the limits by cores and by free memory; the
            total memory stays a limit.
        machine: Capacity of the machine; default: this machine.

    Raises:
        InvalidInput: There are too many ranks for this machine.
    """
    machine = machine or capacity()
    need = f"{plural(ranks, 'rank')} need at least {ranks * RANK_GIB:.1f} GiB of memory"
    if ranks > machine.max_ranks:
        raise InvalidInput(
            f"{need}, but this machine has {machine.total:.1f} GiB; allowed are at most "
            f"{machine.max_ranks} ranks: use fewer workers (neither oversubscribe=True nor "
            "--force lifts this limit)"
        )
    if oversubscribe or os.environ.get(OVERSUBSCRIBE):
        return
    insist = (
        "use fewer workers, or allow more ranks with oversubscribe=True (--force on the "
        "command line)"
    )
    if ranks * RANK_GIB > machine.free:
        raise InvalidInput(f"{need}, but only {machine.free:.1f} GiB of memory are free; {insist}")
    if ranks > RANKS_PER_CORE * machine.cores:
        raise InvalidInput(
            f"{plural(ranks, 'rank')} on {plural(machine.cores, 'core')}: allowed are at most "
            f"{RANKS_PER_CORE * machine.cores} ranks ({RANKS_PER_CORE} per core); {insist}"
        )
