"""What is known of all ranks: a table in memory that the ranks of a host share.

Every host has one. Each rank writes its own row; the rows of other hosts' ranks come in bulletins,
of which each holds all rows of a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

PLACE = 120  # bytes for the name of a call
CAUSE = 352  # bytes for the reason of a failure
NEVER = np.iinfo(np.int64).max

# Silence means that no bulletin has come for so long, while this host's relay was there to take it.
# Bulletins are sent by a thread, ten a second: neither Python that computes (it lets threads in
# every 5 ms) nor a rank that waits, traces or stands in a debugger holds them up; a call that keeps
# the interpreter's lock for longer than this would. A link that was down for 5 s is heard again
# after 6 to 8 s: TCP sends again after 0.2, 0.4, 0.8 … s. A bulletin stands in line behind what
# Open MPI has in hand for that host: where one message takes a slow link longer than this, only
# OMPI_MCA_btl_tcp_flags=send,inplace, which cuts messages up, lets bulletins in between.
SILENT = 8.0  # seconds

# In the order in which a row is written: who sees `failed` or `waiting` sees what belongs to it.
ROW = np.dtype(
    [
        ("place", f"S{PLACE}"),
        ("cause", f"S{CAUSE}"),
        ("since", "f8"),  # by the clock of the host whose table it is in
        ("stop", "i8"),
        ("last", "i8"),
        ("keep", "i8"),
        ("mark", "i8"),  # rises with whatever other hosts must have seen
        ("failed", "u1"),
        ("waiting", "u1"),
    ],
    align=True,
)


class Host(NamedTuple):
    """The ranks that share memory, and the name of where they do."""

    ranks: tuple[int, ...]
    name: str


class Sheet:
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
    """

    def __init__(self, memory: Any, hosts: Sequence[Host], here: int) -> None:
        self.hosts, self.here = hosts, here
        whole = np.ndarray((), _whole(hosts), memory)
        self.rows, self.seen, self.heard = whole["rows"], whole["seen"], whole["heard"]
        self.turned = whole["turned"]
        self._own = list(hosts[here].ranks)
        self._bulletins = [_bulletin(host, len(self.rows)) for host in hosts]

    @staticmethod
    def nbytes(hosts: Sequence[Host]) -> int:
        """The memory that it takes."""
        return _whole(hosts).itemsize

    def clear(self, now: float) -> None:
        """Begin: nobody waits, has failed or wants to stop."""
        self.rows[...] = (b"the start", b"", now, NEVER, NEVER, NEVER, 0, 0, 0)
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

    def write(self, bulletin: np.ndarray, now: float, last: bool) -> None:
        """Fill a bulletin of this host."""
        # A rank may write meanwhile. What its mark promises is there, for that was read before;
        # a call that it has just come to or from is not said to be waited in.
        before = self.rows[self._own]
        rows = self.rows[self._own]
        rows["mark"] = before["mark"]
        same = self.rows["since"][self._own] == before["since"]
        rows["waiting"] &= same & self.rows["waiting"][self._own].astype(bool)
        bulletin["rows"], bulletin["seen"] = rows, self.rows["mark"]
        bulletin["seen"][self._own] = before["mark"]
        bulletin["now"], bulletin["last"] = now, last

    def read(self, host: int, bulletin: np.ndarray, now: float) -> bool:
        """Take over what a bulletin of another host says; whether it was its last."""
        ranks, rows = list(self.hosts[host].ranks), bulletin["rows"]
        self.rows["waiting"][ranks] = 0
        for name in ROW.names or ():
            # Clocks of two hosts have nothing in common but their rate.
            shift = now - bulletin["now"] if name == "since" else 0
            self.rows[name][ranks] = rows[name] + shift if shift else rows[name]
        self.seen[host] = NEVER if bulletin["last"] else bulletin["seen"]
        self.heard[host] = math.inf if bulletin["last"] else now
        return bool(bulletin["last"])

    def everywhere(self, rank: int | None = None) -> bool:
        """Whether every host has a rank's row as it is now, or those of all ranks of this host."""
        ranks = self._own if rank is None else [rank]
        return bool(np.all(self.seen[:, ranks] >= self.rows["mark"][ranks]))

    def silent(self) -> tuple[Host, float] | None:
        """A host that has not been heard for longer than `SILENT`, and the seconds."""
        # By when this host has looked: one that was held up itself has nothing to say of others.
        number = int(np.argmin(self.heard))
        seconds = float(self.turned - self.heard[number])
        return (self.hosts[number], seconds) if seconds > SILENT else None


def _whole(hosts: Sequence[Host]) -> np.dtype[Any]:
    count, size = len(hosts), sum(len(host.ranks) for host in hosts)
    return np.dtype(
        [
            ("rows", ROW, (size,)),
            ("seen", "i8", (count, size)),
            ("heard", "f8", (count,)),
            ("turned", "f8"),
        ]
    )


def _bulletin(host: Host, size: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("rows", ROW, (len(host.ranks),)),
            ("seen", "i8", (size,)),  # the marks of all ranks in the sender's table
            ("now", "f8"),  # by the sender's clock
            ("last", "i8"),
        ]
    )
