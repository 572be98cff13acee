"""What processes of this host are doing, seen from outside: also those that are stuck.

Each has a file without a name into which SIGUSR2 writes the Python stack of its main thread. The
handler is C code that wants no lock of the interpreter, so that it answers in the midst of a call
into a library, too. Whoever looks reads the file through /proc; no folder is shared.
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
APART = 0.2  # seconds between two looks at the time that a process has computed
ANSWER = 1.0  # seconds in which one that can has written its stack, under load too
BUSY = 0.5  # of a core
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_OUTERMOST = (" in _run_module_as_main\n", " in <module>\n", "  ...\n")
_OTHERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen ")


class ProcessSnapshot(NamedTuple):
    """What a process is doing.

    Attributes:
        state: "busy", "idle", "asleep", "stopped by a signal", "swapped out", "without a core",
            "waiting for a disk" or "gone".
        line: where its main thread stands; "" where it does not say.
    """

    state: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.state} at {self.line}" if self.line else self.state


@cache
def answer() -> None:
    """Let this process be looked at; a handler of the user's own for SIGUSR2 stays."""
    if hasattr(os, "memfd_create") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, os.memfd_create(NAME), all_threads=False)


def look(pids: Sequence[int], clock: Clock) -> list[ProcessSnapshot]:
    """What processes of this host are doing; takes some tenths of a second."""
    before = [_computed(pid) for pid in pids]
    asked = [_ask(pid) for pid in pids]
    start = clock.now()
    clock.sleep(APART)
    while not all(each.has_come for each in asked if each) and clock.now() < start + ANSWER:
        clock.sleep(0.01)
    seconds = clock.now() - start
    return [
        ProcessSnapshot(_state(pid, spent, seconds), _line(each.text) if each else "")
        for pid, spent, each in zip(pids, before, asked, strict=True)
    ]


class _Asked:
    """A process that has been asked for its stack."""

    def __init__(self, file: Path) -> None:
        self._file, self._before = file, file.stat().st_size

    @property
    def text(self) -> str:
        with suppress(OSError):  # it has ended meanwhile
            return self._file.read_bytes()[self._before :].decode(errors="replace")
        return ""

    @property
    def has_come(self) -> bool:
        return self.text.endswith(_OUTERMOST)


def _ask(pid: int) -> _Asked | None:
    """Ask a process for its stack; None of one that cannot answer, or is no process of ours."""
    with suppress(OSError, psutil.Error):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return None
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(file).startswith(f"/memfd:{NAME}"):
                asked = _Asked(file)
                os.kill(pid, signal.SIGUSR2)
                return asked
    return None


def _computed(pid: int) -> float:
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
        spent = _computed(pid) - before
        if spent > 0:
            return "busy" if spent > BUSY * seconds else "idle"
        if getattr(process.memory_full_info(), "swap", 0) > process.memory_info().rss:
            return "swapped out"
        asleep = {psutil.STATUS_RUNNING: "without a core", "disk-sleep": "waiting for a disk"}
        return asleep.get(status, "asleep")
    except psutil.NoSuchProcess:
        return "gone"


def _line(stack: str) -> str:
    """The innermost line, and that of the user's own code which has led there."""
    frames = [match.groups() for match in map(_FRAME.search, stack.splitlines()) if match]
    own = next((frame for frame in frames if _is_users(frame[0])), None)
    told = [_location(*frame) for frame in (*frames[:1], *([own] if own else []))]
    return ", called from ".join(dict.fromkeys(told))


def _is_users(file: str) -> bool:
    return not file.startswith(_OTHERS) and "site-packages" not in file


def _location(file: str, line: str, function: str) -> str:
    path = Path(file)
    if not path.exists():  # a cell's code lies in no file
        return f"line {line} of {'a cell' if function == '<module>' else function}"
    return f"{path.parent.name}/{path.name}:{line} {function}"
