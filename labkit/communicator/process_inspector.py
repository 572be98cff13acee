"""Inspection of other processes on this host, including processes that hang.

Each inspected process has an unnamed in-memory file (memfd). When the process receives the signal
SIGUSR2, a handler writes the Python stack of its main thread into this file. The handler is C code
that does not need Python's global interpreter lock, so it also works while the process runs inside
a library call. The inspecting process reads the memfd of another process through /proc, so no
shared folder is needed.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from labkit.communicator.clock import Clock

NAME = "labkit-look"
SAMPLE_SECONDS = 0.2  # seconds between the two readings of a process's CPU time
STACK_TIMEOUT = 1.0  # maximum seconds that a process under load may take to write its stack
BUSY = 0.5  # a process that uses more CPU seconds per second is "busy"
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_OUTERMOST = (" in _run_module_as_main\n", " in <module>\n", "  ...\n")
_OTHERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen ")


class ProcessSnapshot(NamedTuple):
    """The state of a process, and the code line that its main thread executes.

    Attributes:
        state: "busy", "idle", "asleep", "stopped by a signal", "swapped out", "without a core",
            "waiting for a disk" or "gone".
        line: The code line that the main thread executes; "" if the process wrote no stack.
    """

    state: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.state} at {self.line}" if self.line else self.state


@cache
def install_stack_handler() -> None:
    """Install the handler of SIGUSR2 that writes this process's stack.

    If the user has already installed a SIGUSR2 handler, the function does not replace it.
    """
    if hasattr(os, "memfd_create") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, os.memfd_create(NAME), all_threads=False)


def inspect_processes(pids: Sequence[int], clock: Clock) -> list[ProcessSnapshot]:
    """Inspect processes of this host, which takes some tenths of a second.

    Args:
        pids: The ids of the processes.
        clock: The clock that measures the time of the inspection.

    Returns:
        The snapshot of each process, in the order of `pids`.
    """
    before = [_cpu_seconds(pid) for pid in pids]
    requests = [_request_stack(pid) for pid in pids]
    start = clock.now()
    clock.sleep(SAMPLE_SECONDS)
    while not all(r.is_complete for r in requests if r) and clock.now() < start + STACK_TIMEOUT:
        clock.sleep(0.01)
    seconds = clock.now() - start
    return [
        ProcessSnapshot(_state(pid, spent, seconds), _line(request.text) if request else "")
        for pid, spent, request in zip(pids, before, requests, strict=True)
    ]


class _StackRequest:
    """A pending request for the Python stack of a process."""

    def __init__(self, file: Path) -> None:
        self._file, self._before = file, file.stat().st_size

    @property
    def text(self) -> str:
        """The stack that the process has written so far; "" if the process has ended."""
        with suppress(OSError):
            return self._file.read_bytes()[self._before :].decode(errors="replace")
        return ""

    @property
    def is_complete(self) -> bool:
        """Whether the stack has been written down to its outermost frame."""
        return self.text.endswith(_OUTERMOST)


def _request_stack(pid: int) -> _StackRequest | None:
    """Request the stack of a process; return None if the process is stopped or has no handler."""
    with suppress(OSError, psutil.Error):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return None
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(file).startswith(f"/memfd:{NAME}"):
                request = _StackRequest(file)
                os.kill(pid, signal.SIGUSR2)
                return request
    return None


def _cpu_seconds(pid: int) -> float:
    with suppress(psutil.Error):
        spent = psutil.Process(pid).cpu_times()
        return float(spent.user + spent.system)
    return 0.0


def _state(pid: int, before: float, seconds: float) -> str:
    try:
        process = psutil.Process(pid)
        status = process.status()
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "stopped by a signal"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        spent = _cpu_seconds(pid) - before
        if spent > 0:
            return "busy" if spent > BUSY * seconds else "idle"
        if getattr(process.memory_full_info(), "swap", 0) > process.memory_info().rss:
            return "swapped out"
        asleep = {psutil.STATUS_RUNNING: "without a core", "disk-sleep": "waiting for a disk"}
        return asleep.get(status, "asleep")
    except psutil.NoSuchProcess:
        return "gone"


def _line(stack: str) -> str:
    """Return the innermost code line of a stack, and the line of user code that called it."""
    frames = [match.groups() for match in map(_FRAME.search, stack.splitlines()) if match]
    user_frame = next((frame for frame in frames if _is_users(frame[0])), None)
    locations = [_location(*f) for f in (*frames[:1], *([user_frame] if user_frame else []))]
    return ", called from ".join(dict.fromkeys(locations))


def _is_users(file: str) -> bool:
    return not file.startswith(_OTHERS) and "site-packages" not in file


def _location(file: str, line: str, function: str) -> str:
    path = Path(file)
    if not path.exists():  # the code of a notebook cell is not in a file
        return f"line {line} of {'a cell' if function == '<module>' else function}"
    return f"{path.parent.name}/{path.name}:{line} {function}"
