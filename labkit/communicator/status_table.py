"""The status table: one row for each rank, in memory that the ranks of a host share.

Every host has one table. Each rank writes its own row. The rows of other hosts arrive in bulletins.
A bulletin is a message with all rows of one host.

Inspection of other processes on this host, including processes that hang.

Each inspected process has an unnamed in-memory file (memfd). At the signal SIGUSR2, a handler
writes the Python stack of the main thread. The handler writes the stack into the process's
in-memory file (memfd). The handler is C code that does not need Python's global interpreter lock.
The handler also works while the process runs inside a library call. The inspecting process reads
the memfd of another process through /proc, so no shared folder is needed.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from labkit.communicator.clock import Clock

PLACE = 120  # The constant `PLACE` is the maximum length in bytes of a call's name.
# A snapshot of a process has at most `LOOK` bytes. A snapshot contains the state and the code line
# of a process.
LOOK = 160
# The constant `CAUSE` is the maximum length in bytes of the text that describes a failure.
CAUSE = 352
# The text `ENDED` is the failure cause of a rank that died without reporting an error.
ENDED = "its process has ended"
PEERS = 64  # Messages with checksums are counted for at most `PEERS` ranks.
COUNTS = 5  # Each rank publishes `COUNTS` progress numbers, whose meaning the caller defines.
NEVER = np.iinfo(np.int64).max

# A host counts as silent after `Limits.silent` seconds without a status bulletin. The relay thread
# must poll for bulletins during the `Limits.silent` seconds. The relay thread sends ten bulletins
# (status rows) per second to each other host. Python switches between threads every 5 ms, so Python
# code that computes does not delay the relay's bulletins. Waits, traces and debuggers do not delay
# the relay thread's status bulletins. A call delays the status bulletins only if it holds Python's
# global interpreter lock for longer than `Limits.silent`. After an outage of 5 s, a link delivers
# again after 6 to 8 s. TCP waits 0.2, 0.4, 0.8 … s before successive retransmissions. Open MPI
# sends a status bulletin only after all earlier messages to the same host. If one long message
# occupies a slow link for more than `Limits.silent` seconds, set
# OMPI_MCA_btl_tcp_flags=send,inplace, which splits messages.

# A rank writes the fields of its status row in the order of `ROW`. A reader that sees `failed` or
# `waiting` set also sees the new values of all earlier fields of the row.
ROW = np.dtype(
    [
        ("place", f"S{PLACE}"),
        ("cause", f"S{CAUSE}"),
        # The field `look` contains the last snapshot of the process: its state and its code line.
        ("look", f"S{LOOK}"),
        # The field `since` is the start time of the current call, on the clock of this table's
        # host.
        ("since", "f8"),
        ("stop", "i8"),  # The field `stop` is the training step after which rank 0 requests a stop.
        # The field `last` is the training step after which this rank's training ends.
        ("last", "i8"),
        # The field `keep` is the number of the step after which ranks save a checkpoint.
        ("keep", "i8"),
        # The field `sent` counts the messages that this rank has sent to each rank.
        ("sent", "u4", (PEERS,)),
        # The field `got` counts the messages that this rank has received from each rank.
        ("got", "u4", (PEERS,)),
        # The method `StatusBoard.count` writes the progress numbers into the field `counts`.
        ("counts", "i8", (COUNTS,)),
        # The field `stands` is the phase in which the progress numbers stay constant; 0 means no
        # phase.
        ("stands", "i8"),
        # The field `mark` counts the writes to the row that other hosts must confirm.
        ("mark", "i8"),
        ("pid", "i4"),
        # The field `round` is the current round of the communication schedule, counted from 1.
        ("round", "i4"),
        ("asks", "i4"),  # The field `asks` counts this rank's requests for process snapshots.
        ("failed", "u1"),
        ("waiting", "u1"),
    ],
    align=True,
)


class HostRanks(NamedTuple):
    """A host of the run: the numbers of its ranks, and its name."""

    ranks: tuple[int, ...]
    name: str


class StatusTable:
    """The status table of one host.

    Args:
        memory: Memory of `nbytes` bytes that the ranks of this host share.
        hosts: The ranks and names of all hosts.
        host_index: The index in `hosts` of the host on which this table is stored.

    Attributes:
        rows: The status rows of all ranks, in rank order.
        confirmed: For each pair (host, rank), the newest row version that the host has received.
            The field `mark` of a row is the row's version number.
        bulletin_times: The arrival time of each host's latest bulletin (status rows). The arrival
            time is infinite if the host sends no more bulletins.
        poll_time: The time when this host's relay last polled for bulletins of other hosts.
        local_ranks: The ranks of this host.
    """

    def __init__(self, memory: Any, hosts: Sequence[HostRanks], host_index: int) -> None:
        self.hosts, self.host_index = hosts, host_index
        whole = np.ndarray((), _table_dtype(hosts), memory)
        self.rows, self.confirmed, self.bulletin_times = (
            whole["rows"],
            whole["seen"],
            whole["heard"],
        )
        self.poll_time = whole["turned"]
        self.local_ranks = list(hosts[host_index].ranks)
        self._bulletins = [_bulletin_dtype(host, len(self.rows)) for host in hosts]

    @staticmethod
    def nbytes(hosts: Sequence[HostRanks]) -> int:
        """Return the size of the status table in bytes."""
        return _table_dtype(hosts).itemsize

    def clear(self, now: float) -> None:
        """Initialize the table: no rank waits, no rank has failed, and no rank requests a stop."""
        self.rows[...] = (b"the start", b"", b"", now, NEVER, NEVER, NEVER, *(0,) * 10)
        self.confirmed[...], self.bulletin_times[...], self.poll_time[...] = 0, now, now
        self.confirmed[self.host_index], self.bulletin_times[self.host_index] = NEVER, math.inf

    def blank(self, host: int) -> np.ndarray:
        """Return an empty bulletin for the rows of a host."""
        return np.zeros((), self._bulletins[host])

    def fail(self, rank: int, cause: str) -> None:
        """Record in a rank's row that the rank has failed, and why."""
        row = self.rows[rank : rank + 1]
        row["cause"] = cause.encode()[:CAUSE]
        row["failed"] = 1
        row["mark"] += 1

    def die(self, rank: int) -> None:
        """Record that the process of a rank has ended, unless the rank reported a failure."""
        if not self.rows["failed"][rank]:
            self.fail(rank, ENDED)

    def leave(self, host: int) -> None:
        """Record that another host will send no more bulletins."""
        self.confirmed[host], self.bulletin_times[host] = NEVER, math.inf

    def record_snapshots(self, clock: Clock) -> None:
        """Write a process snapshot of each rank of this host into the rank's row."""

        process_snapshots = inspect_processes(self.rows["pid"][self.local_ranks].tolist(), clock)
        for rank, process_snapshot in zip(self.local_ranks, process_snapshots, strict=True):
            self.rows["look"][rank] = str(process_snapshot).encode()[:LOOK]

    def write(self, bulletin: np.ndarray, now: float, last: bool) -> None:
        """Write the rows of this host into a bulletin."""
        # A rank may change its status row while the relay thread copies the row. A bulletin's
        # fields `mark` and `stands` come from an earlier read. All other fields of a bulletin are
        # at least as new. A rank may enter another call while its row is read. If the call changes
        # during the read, the bulletin reports no wait.
        before = self.rows[self.local_ranks]
        rows = self.rows[self.local_ranks]
        rows["mark"], rows["stands"] = before["mark"], before["stands"]
        same = self.rows["since"][self.local_ranks] == before["since"]
        rows["waiting"] &= same & self.rows["waiting"][self.local_ranks].astype(bool)
        bulletin["rows"], bulletin["seen"] = rows, self.rows["mark"]
        bulletin["seen"][self.local_ranks] = before["mark"]
        bulletin["now"], bulletin["last"] = now, last

    def read(self, host: int, bulletin: np.ndarray, now: float) -> bool:
        """Copy the rows of another host's bulletin; return whether the host sends no more."""
        ranks, rows = list(self.hosts[host].ranks), bulletin["rows"]
        self.rows["waiting"][ranks] = 0
        for name in ROW.names or ():
            # The clocks of two hosts run at the same rate, but have different zero points.
            shift = now - bulletin["now"] if name == "since" else 0
            self.rows[name][ranks] = rows[name] + shift if shift else rows[name]
        self.confirmed[host], self.bulletin_times[host] = bulletin["seen"], now
        if bulletin["last"]:
            self.leave(host)
        return bool(bulletin["last"])

    def is_confirmed(self, rank: int | None = None) -> bool:
        """Return whether every host has confirmed the current row of a rank.

        Args:
            rank: The number of the rank; None: check the rows of all ranks of this host.
        """
        ranks = self.local_ranks if rank is None else [rank]
        return bool(np.all(self.confirmed[:, ranks] >= self.rows["mark"][ranks]))

    def silent_host(self, limit: float) -> tuple[HostRanks, float] | None:
        """Return a host silent for more than `limit` seconds, and the duration; otherwise None.

        Args:
            limit: Seconds without a bulletin after which a host counts as silent.
        """
        # A host's silence is measured until the relay thread's last poll. Otherwise, a delayed
        # relay thread would find every host silent.
        number = int(np.argmin(self.bulletin_times))
        seconds = float(self.poll_time - self.bulletin_times[number])
        return (self.hosts[number], seconds) if seconds > limit else None


def _table_dtype(hosts: Sequence[HostRanks]) -> np.dtype[Any]:
    count, size = len(hosts), sum(len(host.ranks) for host in hosts)
    return np.dtype(
        [
            ("rows", ROW, (size,)),
            ("seen", "i8", (count, size)),
            ("heard", "f8", (count,)),
            ("turned", "f8"),
        ]
    )


def _bulletin_dtype(host: HostRanks, size: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("rows", ROW, (len(host.ranks),)),
            # The field `seen` contains, for each rank, the latest `mark` that the sending host has
            # received.
            ("seen", "i8", (size,)),
            # The field `now` is the time of the bulletin on the sending host's clock.
            ("now", "f8"),
            ("last", "i8"),
        ]
    )


NAME = "labkit-look"
# Two readings of a process's CPU time are at least `SAMPLE_SECONDS` seconds apart.
SAMPLE_SECONDS = 0.2
# A process under load may take at most `STACK_TIMEOUT` seconds to write its stack.
STACK_TIMEOUT = 1.0
BUSY = 0.5  # A process counts as busy if it uses more than `BUSY` CPU seconds per second.
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
    """Inspect processes of this host; the inspection takes a few tenths of a second.

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
        """Whether the process has written its whole stack, including the outermost frame."""
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
