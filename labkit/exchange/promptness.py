"""A thread that sleeps most of the time asks to run at once when it wakes."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE = 100_000  # ns, the least that Linux allows
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def wake_promptly() -> bool:
    """Ask Linux for short slices of the core for the calling thread; whether it agreed.

    Where all cores compute, a thread that wakes waits until another's slice ends, about 3 ms, for
    every message; one with a shorter slice goes first (Linux 6.12 and later). It gets no larger
    share of the core. Elsewhere nothing changes.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, 0, 0, SLICE, 0, 0)
    done: int = ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)
    return done == 0
