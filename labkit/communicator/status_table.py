"""What is known of all ranks: a table in memory that the ranks of a host share.

Every host has one. Each rank writes its own row; the rows of other hosts' ranks come in bulletins,
of which each holds all rows of a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from labkit.communicator.clock import Clock

PLACE = 120  # bytes for the name of a call
LOOK = 160  # bytes for what a process was seen doing
CAUSE = 352  # bytes for the reason of a failure
ENDED = "its process has ended"  # the cause of a rank that could not say one
PEERS = 64  # ranks, of whose messages counts are kept where these have checksums
COUNTS = 5  # numbers that a rank may tell of itself
NEVER = np.iinfo(np.int64).max

# Silence means that no bulletin has come for so long, while this host's relay was there to take it.
# Bulletins are sent by a thread, ten a second: neither Python that computes (it lets threads in
# every 5 ms) nor a rank that waits, traces or stands in a debugger holds them up; a call that keeps
# the interpreter's lock for longer than this would. A link that was down for 5 s is heard again
# after 6 to 8 s: TCP sends again after 0.2, 0.4, 0.8 … s. A bulletin stands in line behind what
# Open MPI has in hand for that host: where one message takes a slow link longer than this, only
# OMPI_MCA_btl_tcp_flags=send,inplace, which cuts messages up, lets bulletins in between.
# How long that is, `Limits.silent` says.

# In the order in which a row is written: who sees `failed` or `waiting` sees what belongs to it.
ROW = np.dtype(
    [
        ("place", f"S{PLACE}"),
        ("cause", f"S{CAUSE}"),
        ("look", f"S{LOOK}"),  # what its process was seen doing, from outside
        ("since", "f8"),  # by the clock of the host whose table it is in
        ("stop", "i8"),
        ("last", "i8"),
        ("keep", "i8"),
        ("sent", "u4", (PEERS,)),  # messages, by rank
        ("got", "u4", (PEERS,)),
        ("counts", "i8", (COUNTS,)),  # of what it has behind it, the caller's
        ("stands", "i8"),  # still, at the standstill of this number; 0: it moves
        ("mark", "i8"),  # rises with whatever other hosts must have seen
        ("pid", "i4"),
        ("round", "i4"),  # of a schedule, from 1
        ("asks", "i4"),  # rises whenever it wants to know what all are doing
        ("failed", "u1"),
        ("waiting", "u1"),
    ],
    align=True,
)


class HostRanks(NamedTuple):
    """The ranks that share memory, and the name of where they do."""

    ranks: tuple[int, ...]
    name: str


class StatusTable:
    """The table of one host.

    Args:
        memory: `nbytes` of them, which the ranks of this host share.
        hosts: all of them.
        here: the number of this one.

    Attributes:
        rows: one a rank.
        seen: by host and rank, the mark of the row that this host says it has.
        heard: by host, when its last bulletin came; for ever, once that was the last.
        turned: when this host's relay has last looked for bulletins.
        own: the ranks of this host.
    """

    def __init__(self, memory: Any, hosts: Sequence[HostRanks], here: int) -> None:
        self.hosts, self.here = hosts, here
        whole = np.ndarray((), _whole(hosts), memory)
        self.rows, self.seen, self.heard = whole["rows"], whole["seen"], whole["heard"]
        self.turned = whole["turned"]
        self.own = list(hosts[here].ranks)
        self._bulletins = [_bulletin(host, len(self.rows)) for host in hosts]

    @staticmethod
    def nbytes(hosts: Sequence[HostRanks]) -> int:
        """The memory that it takes."""
        return _whole(hosts).itemsize

    def clear(self, now: float) -> None:
        """Begin: nobody waits, has failed or wants to stop."""
        self.rows[...] = (b"the start", b"", b"", now, NEVER, NEVER, NEVER, *(0,) * 10)
        self.seen[...], self.heard[...], self.turned[...] = 0, now, now
        self.seen[self.here], self.heard[self.here] = NEVER, math.inf

    def blank(self, host: int) -> np.ndarray:
        """A bulletin of a host, to be filled."""
        return np.zeros((), self._bulletins[host])

    def fail(self, rank: int, cause: str) -> None:
        """Write down why a rank has failed."""
        row = self.rows[rank : rank + 1]
        row["cause"] = cause.encode()[:CAUSE]
        row["failed"] = 1
        row["mark"] += 1

    def die(self, rank: int) -> None:
        """Write down that the process of a rank has ended, unless it said itself why it fails."""
        if not self.rows["failed"][rank]:
            self.fail(rank, ENDED)

    def leave(self, host: int) -> None:
        """Wait no more for what another host says."""
        self.seen[host], self.heard[host] = NEVER, math.inf

    def look(self, clock: Clock) -> None:
        """Write down what the ranks of this host are doing, seen from outside."""
        from labkit.communicator.process_inspector import look

        process_snapshots = look(self.rows["pid"][self.own].tolist(), clock)
        for rank, process_snapshot in zip(self.own, process_snapshots, strict=True):
            self.rows["look"][rank] = str(process_snapshot).encode()[:LOOK]

    def write(self, bulletin: np.ndarray, now: float, last: bool) -> None:
        """Fill a bulletin of this host."""
        # A rank may write meanwhile. What its mark promises is there, and the counts with which it
        # stands still, for these were read before; a call that it has just come to or from is not
        # said to be waited in.
        before = self.rows[self.own]
        rows = self.rows[self.own]
        rows["mark"], rows["stands"] = before["mark"], before["stands"]
        same = self.rows["since"][self.own] == before["since"]
        rows["waiting"] &= same & self.rows["waiting"][self.own].astype(bool)
        bulletin["rows"], bulletin["seen"] = rows, self.rows["mark"]
        bulletin["seen"][self.own] = before["mark"]
        bulletin["now"], bulletin["last"] = now, last

    def read(self, host: int, bulletin: np.ndarray, now: float) -> bool:
        """Take over what a bulletin of another host says; whether it was its last."""
        ranks, rows = list(self.hosts[host].ranks), bulletin["rows"]
        self.rows["waiting"][ranks] = 0
        for name in ROW.names or ():
            # Clocks of two hosts have nothing in common but their rate.
            shift = now - bulletin["now"] if name == "since" else 0
            self.rows[name][ranks] = rows[name] + shift if shift else rows[name]
        self.seen[host], self.heard[host] = bulletin["seen"], now
        if bulletin["last"]:
            self.leave(host)
        return bool(bulletin["last"])

    def everywhere(self, rank: int | None = None) -> bool:
        """Whether every host has a rank's row as it is now, or those of all ranks of this host."""
        ranks = self.own if rank is None else [rank]
        return bool(np.all(self.seen[:, ranks] >= self.rows["mark"][ranks]))

    def silent(self, limit: float) -> tuple[HostRanks, float] | None:
        """A host that has not been heard for longer than a limit, and the seconds."""
        # By when this host has looked: one that was held up itself has nothing to say of others.
        number = int(np.argmin(self.heard))
        seconds = float(self.turned - self.heard[number])
        return (self.hosts[number], seconds) if seconds > limit else None


def _whole(hosts: Sequence[HostRanks]) -> np.dtype[Any]:
    count, size = len(hosts), sum(len(host.ranks) for host in hosts)
    return np.dtype(
        [
            ("rows", ROW, (size,)),
            ("seen", "i8", (count, size)),
            ("heard", "f8", (count,)),
            ("turned", "f8"),
        ]
    )


def _bulletin(host: HostRanks, size: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("rows", ROW, (len(host.ranks),)),
            ("seen", "i8", (size,)),  # the marks of all ranks in the sender's table
            ("now", "f8"),  # by the sender's clock
            ("last", "i8"),
        ]
    )
