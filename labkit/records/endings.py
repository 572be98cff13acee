"""Who has ended, and by what: in words that a record keeps."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, NoReturn

# Signals by which a system or a person asks for an end; others are faults.
ASKS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_SIGNALLED = re.compile(r"process rank (\d+) .*?exited on\s+signal (\d+)", re.DOTALL)
_EXITED = re.compile(r"@\d+,(\d+)\]\s+Exit code:\s+(\d+)")
_OF_STEP = re.compile(r"srun: error: (\S+: tasks? \S+: .+)")
# mpiexec's words for a host of which it hears no more; before it, its own daemon's name.
_LOST = re.compile(
    r"lost communication with a remote daemon.*?Remote daemon:.*? on node (\S+)", re.DOTALL
)
_NO_REPORT = re.compile(r"daemon failed to report back.*?Remote host:\s+(\S+)", re.DOTALL)
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|[Cc]annot allocate memory|failed to map segment|ResourceExhausted|"
    # What C code says that found no memory and forgot to raise.
    r"error return without exception set|returned NULL without setting an exception|"
    r"can't start new thread|pthread_create|Thread creation failed"
)


class End(NamedTuple):
    """How a cluster, or a process of it, has ended.

    Attributes:
        message: in words.
        rank: the one whose end it was, if it was one's.
        signal: that ended it, such as "SIGKILL"; "" where none did.
    """

    message: str = ""
    rank: int | None = None
    signal: str = ""


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C's asks this process to end; it cleans up as after Ctrl-C."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of such signals: raises Terminated with the signal's name."""
    raise Terminated(signal.Signals(number).name)


@contextmanager
def warned() -> Iterator[None]:
    """Within it SIGTERM, and SIGUSR1, by which Slurm warns of a limit, raise `Terminated`.

    Only in the main thread, and where nobody else has a handler for them.
    """
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    main = threading.current_thread() is threading.main_thread()
    free = [n for n in numbers if main and signal.getsignal(n) == signal.SIG_DFL]
    for number in free:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


def by_whom(error: KeyboardInterrupt, verb: str = "interrupted") -> str:
    """Who has interrupted this process, in words.

    >>> by_whom(KeyboardInterrupt()), by_whom(Terminated("SIGTERM"))
    ('interrupted by the user', 'ended by SIGTERM')
    """
    return f"ended by {error}" if isinstance(error, Terminated) else f"{verb} by the user"


def described(who: str, code: int, said: str = "") -> End:
    """The end of a process with this exit code, or the negative of a signal.

    >>> described("the controller", -9).message
    'the controller was ended by SIGKILL (as the system does when memory runs out)'
    """
    rank = int(who.removeprefix("rank ")) if who.startswith("rank ") else None
    if code >= 0:
        return End(f"{who} ended with code {code}{out_of_memory(said)}", rank)
    names = {Signal.value: Signal.name for Signal in signal.Signals}  # real-time signals have none
    name = names.get(-code, f"signal {-code}")
    if name == "SIGSTOP":
        return End(f"{who} is stopped (SIGSTOP) and does not go on", rank, name)
    hint = " (as the system does when memory runs out)" if name == "SIGKILL" else ""
    return End(f"{who} was ended by {name}{hint or out_of_memory(said)}", rank, name)


def of_host(said: str) -> End | None:
    """The host of which mpiexec hears no more, if it says so."""
    if match := _LOST.search(said) or _NO_REPORT.search(said):
        return End(
            f"host {match[1]} is lost: it, or its link, is down, or mpiexec's daemon on it ended"
        )
    return None


def of_rank(said: str) -> End | None:
    """The rank whose end mpiexec names, if it names one."""
    if match := _SIGNALLED.search(said):
        return described(f"rank {match[1]}", -int(match[2]), said)
    if match := _EXITED.search(said):
        return described(f"rank {match[1]}", int(match[2]), said)
    return None


def of_step(said: str) -> End | None:
    """The ranks whose ends srun tells, in an order that says nothing of who was first.

    >>> of_step("srun: error: b: task 3: Killed").message
    'ranks of the step ended: b: task 3: Killed'
    """
    told = _OF_STEP.findall(said)
    return End(f"ranks of the step ended: {'; '.join(told)}") if told else None


def out_of_memory(said: str) -> str:
    """What to add to an error that says, in whichever words, that memory has run out.

    >>> out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    ': memory ran out (ulimit -v, a quota, or the machine sets its limit)'
    """
    if not _NO_MEMORY.search(said):
        return ""
    return ": memory ran out (ulimit -v, a quota, or the machine sets its limit)"
