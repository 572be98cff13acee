"""Descriptions of how processes ended, from exit codes, signals and messages of mpiexec or srun."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, NoReturn

# The signals SIGTERM, SIGINT, SIGHUP and SIGQUIT request the end of a process. A process counts as
# crashed if a signal outside `STOP_SIGNALS` ends it.
STOP_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_SIGNALLED = re.compile(r"process rank (\d+) .*?exited on\s+signal (\d+)", re.DOTALL)
_EXITED = re.compile(r"@\d+,(\d+)\]\s+Exit code:\s+(\d+)")
_OF_STEP = re.compile(r"srun: error: (\S+: tasks? \S+: .+)")
# The regular expression `_LOST` matches the message that mpiexec prints when it loses a host. The
# message of mpiexec names the lost host after the local host.
_LOST = re.compile(
    r"lost communication with a remote daemon.*?Remote daemon:.*? on node (\S+)", re.DOTALL
)
_NO_REPORT = re.compile(r"daemon failed to report back.*?Remote host:\s+(\S+)", re.DOTALL)
_NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|[Cc]annot allocate memory|failed to map segment|ResourceExhausted|"
    # A C extension that runs out of memory may return an error without an exception, which Python
    # reports.
    r"error return without exception set|returned NULL without setting an exception|"
    r"can't start new thread|pthread_create|Thread creation failed"
)


class End(NamedTuple):
    """A description of how a cluster, or one of the processes in it, ended.

    Attributes:
        message: Text that describes the end; "" if nothing is known about it.
        rank: The rank that ended; None if the description does not concern a single rank.
        signal: Signal that ended the process, such as "SIGKILL"; "" if there was none.
    """

    message: str = ""
    rank: int | None = None
    signal: str = ""


class Terminated(KeyboardInterrupt):
    """An exception for signals that end this process with the same cleanup as Ctrl-C."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by raising `Terminated` with the name of the signal."""
    raise Terminated(signal.Signals(number).name)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM and SIGUSR1 while the context is active.

    Slurm sends SIGUSR1 shortly before a job reaches its time limit. Handlers are installed only in
    the main thread, and only for signals without another handler.
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


def interruption_text(error: KeyboardInterrupt, verb: str = "interrupted") -> str:
    """Return a text that states who or what interrupted this process.

    >>> interruption_text(KeyboardInterrupt()), interruption_text(Terminated("SIGTERM"))
    ('interrupted by the user', 'ended by SIGTERM')
    """
    return f"ended by {error}" if isinstance(error, Terminated) else f"{verb} by the user"


def describe_exit(process: str, code: int, output: str = "") -> End:
    """Describe how a process ended from its exit code, which is negative after a signal.

    >>> describe_exit("the controller", -9).message
    'the controller was ended by SIGKILL (as the system does when memory runs out)'
    """
    rank = int(process.removeprefix("rank ")) if process.startswith("rank ") else None
    if code >= 0:
        return End(f"{process} ended with code {code}{out_of_memory_hint(output)}", rank)
    # The enum `signal.Signals` has no names for most real-time signals.
    names = {Signal.value: Signal.name for Signal in signal.Signals}
    name = names.get(-code, f"signal {-code}")
    if name == "SIGSTOP":
        return End(f"{process} is stopped (SIGSTOP) and does not continue", rank, name)
    hint = " (as the system does when memory runs out)" if name == "SIGKILL" else ""
    return End(f"{process} was ended by {name}{hint or out_of_memory_hint(output)}", rank, name)


def lost_host(output: str) -> End | None:
    """Describe the loss of a host, or return None if mpiexec's output reports no loss."""
    if match := _LOST.search(output) or _NO_REPORT.search(output):
        return End(f"host {match[1]} is lost: the host, its link or its mpiexec daemon is down")
    return None


def ended_rank(output: str) -> End | None:
    """Describe the end of a rank, or return None if mpiexec's output reports no end."""
    if match := _SIGNALLED.search(output):
        return describe_exit(f"rank {match[1]}", -int(match[2]), output)
    if match := _EXITED.search(output):
        return describe_exit(f"rank {match[1]}", int(match[2]), output)
    return None


def ended_step(output: str) -> End | None:
    """Describe the ends of all ranks that srun's output reports, whatever their order.

    >>> ended_step("srun: error: b: task 3: Killed").message
    'ranks of the Slurm step ended: b: task 3: Killed'
    """
    ranks = _OF_STEP.findall(output)
    return End(f"ranks of the Slurm step ended: {'; '.join(ranks)}") if ranks else None


def out_of_memory_hint(output: str) -> str:
    """Return a remark if a process's output shows that memory ran out, and otherwise "".

    >>> out_of_memory_hint("terminate called after throwing an instance of 'std::bad_alloc'")
    ': memory ran out (the limit is set by ulimit -v, a quota, or the machine)'
    """
    if not _NO_MEMORY.search(output):
        return ""
    return ": memory ran out (the limit is set by ulimit -v, a quota, or the machine)"
