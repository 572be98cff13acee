"""Sockets on which processes of this machine listen, and how those of a child move to loopback."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from labkit.common.errors import LabkitError

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_PIDFD_GETFD = 438  # its number on every architecture that Linux has now, see pidfd_getfd(2)
_ATTACH_FILTER = 26  # see socket(7)
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # the one instruction of a filter that accepts 0 bytes
_LOOK = 5e-3  # seconds between two looks at a child
_STOP = 1.0  # seconds that all threads of a process get to stop


class Listener(NamedTuple):
    """A TCP socket on which a process listens.

    Attributes:
        descriptor: its number in the process.
        address, port: at which others reach it.
    """

    descriptor: int
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether processes of this machine alone reach it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)


def listeners(process: psutil.Process) -> list[Listener]:
    """All of a process, in the network namespace that it is in."""
    return [
        Listener(connection.fd, connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def exposed(process: psutil.Process) -> list[Listener]:
    """Those that other machines may reach."""
    return [listener for listener in listeners(process) if not listener.is_local]


def confine(process: psutil.Process, patience: float = 0.0, deaf: bool = False) -> bool:
    """Bind the listeners of a child to loopback, at their ports, while all its threads stand still.

    Return whether there were any.

    A program that binds to every interface, as Open MPI's daemon does, knows no option for that.

    Args:
        process: the child.
        patience: seconds in which it may begin to listen.
        deaf: nobody reaches these sockets any more, other users of this machine neither.

    Raises:
        LabkitError: the system does not let this process do so.
    """
    end = time.monotonic() + patience
    while not exposed(process):
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK)
    try:
        with _stopped(process):
            handle = os.pidfd_open(process.pid)
            try:
                for listener in exposed(process):
                    _rebind(handle, listener, deaf)
            finally:
                os.close(handle)
        return True
    except (AttributeError, OSError) as error:  # another system than Linux has no `pidfd_open`
        raise LabkitError(
            f"the sockets of process {process.pid} cannot be bound: {error}"
        ) from None


@contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    """Let a process stand still: a thread that saw its socket closed would report a failure."""
    process.suspend()
    try:
        end = time.monotonic() + _STOP
        while not _is_still(process.pid) and time.monotonic() < end:
            time.sleep(_LOOK)
        yield
    finally:
        process.resume()


def _is_still(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    tasks = Path(f"/proc/{pid}/task")
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
    return all(state in "Tt" for state in states)


def _rebind(handle: int, listener: Listener, deaf: bool) -> None:
    """Take a listening socket back to its beginning, and let it listen on loopback.

    Linux gives a socket that stops listening its address back; both processes share the socket.
    A closed socket would wake its owner again and again; of a deaf one the kernel drops all that
    comes.
    """
    own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, listener.descriptor, 0)
    if own < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=own) as shared:
        shared.shutdown(socket.SHUT_RDWR)
        if deaf:
            program = ctypes.create_string_buffer(_DROP)
            told = struct.pack("HP", 1, ctypes.addressof(program))
            shared.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, told)
        shared.bind((LOOPBACK[shared.family], listener.port))
        shared.listen(socket.SOMAXCONN)
