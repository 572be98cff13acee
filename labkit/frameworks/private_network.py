"""A private network for the processes of a run: a network namespace with loopback only.

    python -m labkit.frameworks.private_network [COMMAND WORD…]

This program enables the loopback interface of its namespace, and then executes COMMAND. Without
COMMAND, the program keeps the namespace until its standard input ends. TensorFlow's servers and the
rendezvous of PyTorch, JAX and Horovod listen on every interface without authentication. Processes
outside a private network namespace cannot reach these ports inside it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from labkit.common.errors import LabkitError
from labkit.common.machine import TRUSTED, trusts_network

_FLAGS, _UP, _RUNNING = 0x8914, 0x1, 0x40  # SIOCSIFFLAGS, IFF_UP, IFF_RUNNING; see netdevice(7)
READY = "ready"


@contextmanager
def private_network(label: str, trusted: bool = False) -> Iterator[list[str]]:
    """Create a private network, and yield the command prefix that runs a command in it.

    Args:
        label: Name of the program that listens on ports, for the error message.
        trusted: True if other processes and machines may reach the program; the command prefix is
            then empty.

    Raises:
        LabkitError: The system does not allow this user to create a namespace.
    """
    if trusted or trusts_network():
        yield []
        return
    pipe = subprocess.PIPE
    try:
        holder = subprocess.Popen(
            _unshare_command(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
    except OSError as error:
        raise refusal(label, str(error)) from None
    with holder:  # At the end of the context, the holder's input is closed, which ends the holder.
        assert holder.stdout is not None  # for the type checker
        if holder.stdout.readline().strip() != READY:
            raise refusal(label, holder.communicate()[1].strip())
        yield enter_command(holder.pid)


def isolate(label: str) -> list[str]:
    """Return the prefix that runs a command and its children in a private network.

    Args:
        label: Name of the program that listens on ports, for the error message.

    Raises:
        LabkitError: The system does not allow this user to create a namespace, and the network is
            not trusted.
    """
    if trusts_network():
        return []
    try:
        completed = subprocess.run([*_unshare_command(), "true"], capture_output=True, text=True)
    except OSError as error:
        raise refusal(label, str(error)) from None
    if completed.returncode:
        raise refusal(label, completed.stderr.strip())
    return _unshare_command()


def _unshare_command() -> list[str]:
    unshare = [shutil.which("unshare") or "unshare", *_as_root("--map-root-user"), "--net"]
    return [*unshare, sys.executable, "-P", "-m", __name__]


def enter_command(pid: int) -> list[str]:
    """Return the prefix that runs a command in the network namespace of another process."""
    nsenter = shutil.which("nsenter") or "nsenter"
    return [nsenter, *_as_root("--preserve-credentials"), "--net", "--target", str(pid)]


def refusal(label: str, reason: str) -> LabkitError:
    """Return the error for a system on which labkit cannot create a private network."""
    return LabkitError(
        f"{label} would listen on every interface of this machine, unencrypted and without a key, "
        "so anyone who can reach it could read and change the training; labkit isolates it in a "
        f"network namespace, but this system refuses that ({reason or 'without a message'}); on a "
        f"network that you trust, give trusted_network=True or set {TRUSTED}=1"
    )


def _as_root(option: str) -> list[str]:
    """Return the options that give a user without root rights these rights in a new namespace."""
    return [] if os.geteuid() == 0 else ["--user", option]


def main(command: list[str]) -> None:
    """Enable loopback; then execute the command, or keep the namespace until stdin ends."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _FLAGS, struct.pack("16sH22x", b"lo", _UP | _RUNNING))
    if command:
        os.execvp(command[0], command)
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
