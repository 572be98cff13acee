"""How many MPI ranks the memory and the cores of this machine allow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.common.paths import usable_cores
from labkit.common.units import plural

# Resident memory of a rank that has imported TensorFlow and built a small model, in GiB (measured:
# TensorFlow 2.21, Keras 3, Linux, one thread).
RANK_GIB = 0.7
RANKS_PER_CORE = 8
OVERSUBSCRIBE = "LABKIT_OVERSUBSCRIBE"  # set by --force for all processes of a command
# The memory limit of a container, as cgroups of version 2 and 1 state it.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


class Capacity(NamedTuple):
    """Cores and memory of a machine.

    Attributes:
        cores: that this process may use.
        free: memory that is free, in GiB.
        total: all memory, in GiB.
    """

    cores: int
    free: float
    total: float

    @property
    def most(self) -> int:
        """The hard limit: the ranks that fill all memory; at least one."""
        return max(1, int(self.total / RANK_GIB))


def capacity(groups: Path = Path("/sys/fs/cgroup")) -> Capacity:
    """Return the capacity of this machine, or of the container that limits it.

    Args:
        groups: the folder in which Linux states the limits of a container.
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
    """Refuse more ranks than this machine can start.

    Args:
        ranks: to start on this machine.
        oversubscribe: allow more than its cores and its free memory; all its memory is the limit.
        machine: default: this one.

    Raises:
        InvalidInput: the ranks do not fit.
    """
    machine = machine or capacity()
    need = f"{plural(ranks, 'rank')} want at least {ranks * RANK_GIB:.1f} GiB of memory"
    if ranks > machine.most:
        raise InvalidInput(
            f"{need}, this machine has {machine.total:.1f} GiB: allowed are {machine.most}; take "
            "fewer workers (neither oversubscribe=True nor --force lifts this limit)"
        )
    if oversubscribe or os.environ.get(OVERSUBSCRIBE):
        return
    insist = "take fewer workers, or insist with oversubscribe=True (--force of a command)"
    if ranks * RANK_GIB > machine.free:
        raise InvalidInput(f"{need}, {machine.free:.1f} GiB are free; {insist}")
    if ranks > RANKS_PER_CORE * machine.cores:
        raise InvalidInput(
            f"{plural(ranks, 'rank')} on {plural(machine.cores, 'core')}: allowed are "
            f"{RANKS_PER_CORE * machine.cores}, {RANKS_PER_CORE} for each core; {insist}"
        )
