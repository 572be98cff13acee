"""Listening TCP sockets of processes; those of child processes can be rebound to loopback."""

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
_PIDFD_GETFD = 438  # system call number, equal on all architectures, see pidfd_getfd(2)
_ATTACH_FILTER = 26  # number of the socket option SO_ATTACH_FILTER, see socket(7)
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a BPF program whose one instruction drops each packet
_LOOK = 5e-3  # seconds between two checks of a child process
_STOP = 1.0  # maximum seconds to wait until all threads of a process have stopped


class Listener(NamedTuple):
    """A TCP socket on which a process listens.

    Attributes:
        descriptor: File descriptor of the socket in the process that listens.
        address, port: Local address and port of the socket.
    """

    descriptor: int
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach the socket."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)


def listeners(process: psutil.Process) -> list[Listener]:
    """Return all listening TCP sockets of a process."""
    return [
        Listener(connection.fd, connection.laddr.ip, connection.laddr.port)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def exposed_listeners(process: psutil.Process) -> list[Listener]:
    """Return those listening sockets of a process that other machines can reach."""
    return [listener for listener in listeners(process) if not listener.is_local]


def confine(process: psutil.Process, patience: float = 0.0, drop_packets: bool = False) -> bool:
    """Rebind a child process's exposed listening sockets to loopback, at the same ports.

    Some programs, such as Open MPI's daemon, listen on every network interface and have no option
    to restrict it. The child process is stopped while its sockets are rebound.

    Args:
        process: The child process.
        patience: Maximum seconds to wait for the child's first listening socket.
        drop_packets: Whether the sockets drop all packets, even packets from this machine.

    Returns:
        Whether the child process has any socket to rebind.

    Raises:
        LabkitError: The operating system does not permit the change.
    """
    end = time.monotonic() + patience
    while not exposed_listeners(process):
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK)
    try:
        with _stopped(process):
            handle = os.pidfd_open(process.pid)
            try:
                for listener in exposed_listeners(process):
                    _rebind(handle, listener, drop_packets)
            finally:
                os.close(handle)
        return True
    # On systems other than Linux, `pidfd_open` does not exist.
    except (AttributeError, OSError) as error:
        raise LabkitError(
            f"the listening sockets of process {process.pid} cannot be restricted to loopback: "
            f"{error}"
        ) from None


@contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    """Stop a process inside the context, because its threads could fail while sockets change."""
    process.suspend()
    try:
        end = time.monotonic() + _STOP
        while not _is_still(process.pid) and time.monotonic() < end:
            time.sleep(_LOOK)
        yield
    finally:
        process.resume()


def _is_still(pid: int) -> bool:
    """Return whether every thread of a process is stopped."""
    tasks = Path(f"/proc/{pid}/task")
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
    return all(state in "Tt" for state in states)


def _rebind(handle: int, listener: Listener, drop_packets: bool) -> None:
    """Shut down a listening socket, and let it listen again on loopback.

    On Linux, `shutdown` unbinds a listening socket. The call of `shutdown` also affects the process
    that owns the socket, because both processes share the socket. The socket is not closed, because
    a closed socket would wake its owner repeatedly.
    """
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(
        _PIDFD_GETFD, handle, listener.descriptor, 0
    )
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=descriptor) as shared:
        shared.shutdown(socket.SHUT_RDWR)
        if drop_packets:
            program = ctypes.create_string_buffer(_DROP)
            argument = struct.pack("HP", 1, ctypes.addressof(program))
            shared.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, argument)
        shared.bind((LOOPBACK[shared.family], listener.port))
        shared.listen(socket.SOMAXCONN)
