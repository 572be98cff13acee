"""Numbers of bytes sent between processes, from the kernel's counters of TCP connections.

    python -m labkit.frameworks.tcp_counters DESCRIPTOR

This program opens a netlink socket in its network namespace. The program then sends the netlink
socket to its parent process. The program inherits a socket to its parent with the file descriptor
DESCRIPTOR.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from labkit.common.canonical_json import JSON

_SOCK_DIAG = 4  # The number is the kernel's constant NETLINK_SOCK_DIAG.
# The numbers are the kernel's constants SOCK_DIAG_BY_FAMILY, and NLM_F_REQUEST | NLM_F_DUMP.
_BY_FAMILY, _DUMP = 20, 0x301
# The constants ask the kernel for established TCP connections with details.
_ESTABLISHED, _INFO = 1 << 1, 2
_ACKED = 120  # In struct tcp_info, the field tcpi_bytes_acked has an offset of 120 bytes.


class Connection(NamedTuple):
    """One end of a TCP connection on this host.

    Attributes:
        port, other: TCP port of this end, and of the other end of the connection.
        inode: Inode number of the socket, which also identifies it among the open files of a
            process.
        sent: Bytes that this end has sent and the other end has acknowledged.
    """

    port: int
    other: int
    inode: int
    sent: int


class ByteCounters:
    """Counters of bytes between tasks whose processes run on this host; on Linux only.

    For a closed connection, the counted bytes are those that the last successful `read` found.

    Args:
        tasks: Process number (PID) of each task. If a process runs several tasks, all its bytes
            count for the first of them.
        networks: Command prefixes, one for each network namespace whose counters are read; default:
            only the present namespace.
    """

    def __init__(self, tasks: Mapping[str, int], networks: Sequence[Sequence[str]] = ()) -> None:
        self.tasks, self._sockets = dict(tasks), [open_socket(words) for words in networks or [()]]
        self._task_of: dict[int, str] = {}  # inode -> task
        # `_pairs` maps a socket's inode to its sending task and its receiving task.
        self._pairs: dict[int, tuple[str, str]] = {}
        self._seen: dict[int, int] = {}
        # `_sent` maps a socket's inode to the number of counted bytes.
        self._sent: dict[int, int] = {}

    def read(self, senders: Container[str], counts: bool = True) -> int:
        """Read the counters; return the total bytes that `senders` sent, or 0 without counters.

        Args:
            senders: Tasks whose sent bytes are summed.
            counts: Whether the bytes since the last call are counted (True, the default) or skipped
                (False).
        """
        ends = [end for kernel in self._sockets for end in connections(kernel)]
        if any(end.inode not in self._task_of for end in ends):
            self._task_of = dict.fromkeys((end.inode for end in ends), "") | self._task_of
            self._task_of |= dict(self._open())
            of_ports = {(end.port, end.other): self._task_of.get(end.inode, "") for end in ends}
            for end in ends:
                source, target = self._task_of[end.inode], of_ports.get((end.other, end.port), "")
                if source and target and source != target:
                    self._pairs[end.inode] = source, target
        for end in (end for end in ends if end.inode in self._pairs):
            new_bytes = end.sent - self._seen.get(end.inode, 0)
            self._seen[end.inode] = end.sent
            self._sent[end.inode] = self._sent.get(end.inode, 0) + counts * new_bytes
        return sum(n for inode, n in self._sent.items() if self._pairs[inode][0] in senders)

    def reset(self) -> None:
        """Set the counted bytes of all connections to 0."""
        self._sent = dict.fromkeys(self._sent, 0)

    def matrix(self, senders: Iterable[str]) -> dict[str, JSON]:
        """Return the bytes from each of the senders to every task; empty without counters."""
        # Worker processes always have TCP connections. An empty table of sockets means that the
        # kernel offers no byte counters.
        if not self._task_of:
            return {}
        matrix = {task: dict.fromkeys(self.tasks, 0) for task in senders}
        for inode, (source, target) in self._pairs.items():
            if source in matrix:
                matrix[source][target] += self._sent[inode]
        return {task: dict(row) for task, row in matrix.items()}

    def _open(self) -> Iterator[tuple[int, str]]:
        """Yield (inode, task) for each socket that a task's process has open."""
        for task, pid in reversed(self.tasks.items()):
            yield from ((inode, task) for inode in socket_inodes(pid))


def socket_inodes(pid: int) -> Iterator[int]:
    """Yield the inode number of each socket that a process has open; none if it has ended."""
    with suppress(OSError):  # The list of /proc/PID/fd is not readable if the process has ended.
        for name in os.listdir(f"/proc/{pid}/fd"):
            # The link is not readable if the process has closed the descriptor.
            with suppress(OSError):
                target = str(Path(f"/proc/{pid}/fd/{name}").readlink())
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def open_socket(inside: Sequence[str] = ()) -> socket.socket | None:
    """Return a netlink socket that reports TCP connections; None if the kernel cannot report.

    A netlink socket belongs to the network namespace in which it is opened. A thread of the calling
    process cannot enter a user's namespace. A subprocess therefore opens the netlink socket of
    another namespace.

    Args:
        inside: Command prefix that runs a command in the namespace; empty for the present
            namespace.
    """
    if not inside:
        with suppress(OSError, AttributeError):
            return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
        return None
    receiver, sender = socket.socketpair()
    with receiver, sender:
        command = [*inside, sys.executable, "-P", "-m", __name__, str(sender.fileno())]
        subprocess.run(command, pass_fds=[sender.fileno()], check=True)
        _, descriptors, _, _ = socket.recv_fds(receiver, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def connections(kernel: socket.socket | None) -> list[Connection]:
    """Return the established TCP connections in the namespace of a netlink socket."""
    established: list[Connection] = []
    if kernel is None:
        return established
    for family in (socket.AF_INET, socket.AF_INET6):
        # The request fails if the network namespace does not support the address family.
        with suppress(OSError):
            established.extend(_dump(kernel, family))
    return established


def _dump(kernel: socket.socket, family: int) -> Iterator[Connection]:
    """Yield the connections of an address family that the kernel reports, see sock_diag(7)."""
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
    body = request + bytes(48)  # A request with empty addresses selects all connections.
    kernel.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _DUMP, 1, 0) + body)
    while True:
        data = kernel.recv(1 << 18)
        offset = 0
        while offset < len(data):
            length, kind = struct.unpack_from("=IH", data, offset)
            # Any other kind of message reports the end of the list of connections, or an error.
            if kind != _BY_FAMILY:
                return
            yield from _parsed(data[offset + 16 : offset + length])
            offset += (length + 3) & ~3


def _parsed(message: bytes) -> Iterator[Connection]:
    port, other = struct.unpack_from("!HH", message, 4)
    (inode,) = struct.unpack_from("=I", message, 68)
    offset = 72
    while offset < len(message):
        length, kind = struct.unpack_from("=HH", message, offset)
        if kind == _INFO and length >= 4 + _ACKED + 8:
            (sent,) = struct.unpack_from("=Q", message, offset + 4 + _ACKED)
            yield Connection(port, other, inode, sent)
        offset += (length + 3) & ~3


def main(descriptor: int) -> None:
    """Open a netlink socket, and send it to the parent process over the socket `descriptor`."""
    counters_socket = open_socket()
    with socket.socket(fileno=descriptor) as asker:
        socket.send_fds(asker, [b"!"], [counters_socket.fileno()] if counters_socket else [])


if __name__ == "__main__":
    main(int(sys.argv[1]))
