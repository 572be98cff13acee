"""Who has sent how many bytes to whom: the kernel's own counters of the TCP connections between.

    python -m labkit.frameworks.tcp_counters DESCRIPTOR

This program opens the kernel's book of connections where it runs, and hands it over.
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

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY, _DUMP = 20, 0x301  # SOCK_DIAG_BY_FAMILY; NLM_F_REQUEST | NLM_F_DUMP
_ESTABLISHED, _INFO = 1 << 1, 2  # states asked for; INET_DIAG_INFO
_ACKED = 120  # place of tcpi_bytes_acked in struct tcp_info


class Connection(NamedTuple):
    """One end of a TCP connection of this host.

    Attributes:
        port, other: its own, and that of the end that it talks to.
        inode: by which a process has it open.
        sent: bytes that the other end has received.
    """

    port: int
    other: int
    inode: int
    sent: int


class Wires:
    """Bytes between processes of this host, by the names of their tasks.

    A connection that has closed counts with what was last seen of it. Linux alone counts.

    Args:
        tasks: the process of each task; several tasks of one process have its first one's bytes.
        networks: in which they talk: words before a command that runs there; none: in this one's.
    """

    def __init__(self, tasks: Mapping[str, int], networks: Sequence[Sequence[str]] = ()) -> None:
        self.tasks, self._books = dict(tasks), [book(words) for words in networks or [()]]
        self._who: dict[int, str] = {}  # inode -> task
        self._pairs: dict[int, tuple[str, str]] = {}  # inode -> who sends to whom
        self._seen: dict[int, int] = {}
        self._sent: dict[int, int] = {}  # of what was seen, what counts

    def look(self, senders: Container[str], counts: bool = True) -> int:
        """Read the counters; the bytes of these tasks so far, 0 where the kernel does not tell.

        Args:
            senders: the tasks.
            counts: whether those since the last look count.
        """
        ends = [end for each in self._books for end in connections(each)]
        if any(end.inode not in self._who for end in ends):
            self._who = dict.fromkeys((end.inode for end in ends), "") | self._who
            self._who |= dict(self._open())
            of_ports = {(end.port, end.other): self._who.get(end.inode, "") for end in ends}
            for end in ends:
                source, target = self._who[end.inode], of_ports.get((end.other, end.port), "")
                if source and target and source != target:
                    self._pairs[end.inode] = source, target
        for end in (end for end in ends if end.inode in self._pairs):
            more = end.sent - self._seen.get(end.inode, 0)
            self._seen[end.inode] = end.sent
            self._sent[end.inode] = self._sent.get(end.inode, 0) + counts * more
        return sum(n for inode, n in self._sent.items() if self._pairs[inode][0] in senders)

    def forget(self) -> None:
        """Count from here."""
        self._sent = dict.fromkeys(self._sent, 0)

    def matrix(self, senders: Iterable[str]) -> dict[str, JSON]:
        """Bytes from each of these tasks to each task, as last looked at; none without counters."""
        if not self._who:  # not one connection of this host, to which its engines are connected
            return {}
        found = {task: dict.fromkeys(self.tasks, 0) for task in senders}
        for inode, (source, target) in self._pairs.items():
            if source in found:
                found[source][target] += self._sent[inode]
        return {task: dict(row) for task, row in found.items()}

    def _open(self) -> Iterator[tuple[int, str]]:
        """The sockets that processes have open, and whose they are."""
        for task, pid in reversed(self.tasks.items()):
            with suppress(OSError):  # it has ended
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        target = str(Path(f"/proc/{pid}/fd/{name}").readlink())
                        if target.startswith("socket:["):
                            yield int(target[8:-1]), task


def book(inside: Sequence[str] = ()) -> socket.socket | None:
    """The kernel's book of connections, which belongs to the network where it was opened.

    Args:
        inside: words before a command, that say where; none: here. No other thread of this process
            has to go there, which a namespace of a user's own would not allow.

    Returns:
        None where the kernel has none.
    """
    if not inside:
        with suppress(OSError, AttributeError):
            return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
        return None
    here, there = socket.socketpair()
    with here, there:
        command = [*inside, sys.executable, "-P", "-m", __name__, str(there.fileno())]
        subprocess.run(command, pass_fds=[there.fileno()], check=True)
        _, descriptors, _, _ = socket.recv_fds(here, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def connections(kernel: socket.socket | None) -> list[Connection]:
    """All that are established in the network of this book; none without one."""
    found: list[Connection] = []
    if kernel is None:
        return found
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # no such connections here
            found.extend(_dump(kernel, family))
    return found


def _dump(kernel: socket.socket, family: int) -> Iterator[Connection]:
    """Ask the kernel, see sock_diag(7)."""
    asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
    body = asked + bytes(48)  # no addresses: all
    kernel.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _DUMP, 1, 0) + body)
    while True:
        data = kernel.recv(1 << 18)
        at = 0
        while at < len(data):
            length, kind = struct.unpack_from("=IH", data, at)
            if kind != _BY_FAMILY:  # the end, or an error
                return
            yield from _parsed(data[at + 16 : at + length])
            at += (length + 3) & ~3


def _parsed(message: bytes) -> Iterator[Connection]:
    port, other = struct.unpack_from("!HH", message, 4)
    (inode,) = struct.unpack_from("=I", message, 68)
    at = 72
    while at < len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO and length >= 4 + _ACKED + 8:
            (sent,) = struct.unpack_from("=Q", message, at + 4 + _ACKED)
            yield Connection(port, other, inode, sent)
        at += (length + 3) & ~3


def main(descriptor: int) -> None:
    """Hand the book over, by a socket of the process that asks; nothing where there is none."""
    found = book()
    with socket.socket(fileno=descriptor) as asker:
        socket.send_fds(asker, [b"!"], [found.fileno()] if found else [])


if __name__ == "__main__":
    main(int(sys.argv[1]))
