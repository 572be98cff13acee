"""A network that processes of one run have to themselves: a namespace with loopback alone.

    python -m labkit.frameworks.private_network [COMMAND WORD…]

This program brings loopback up and becomes the command. Without one it holds the namespace until
its input ends. TensorFlow's servers and the meeting points of PyTorch, JAX and Horovod listen on
every interface without a key; here that is one which nobody else reaches.
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
def private_network(what: str, trusted: bool = False) -> Iterator[list[str]]:
    """Make such a network; the words before each command that is to run in it.

    Args:
        what: listens there, for the refusal.
        trusted: whether it may be reached from elsewhere; then there are no words.

    Raises:
        LabkitError: the system lets nobody of this user make one.
    """
    if trusted or trusts_network():
        yield []
        return
    pipe = subprocess.PIPE
    try:
        holder = subprocess.Popen(_alone(), stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise refusal(what, str(error)) from None
    with holder:  # which closes its input
        assert holder.stdout is not None  # for the type checker: pipes were asked for
        if holder.stdout.readline().strip() != READY:
            raise refusal(what, holder.communicate()[1].strip())
        yield entering(holder.pid)


def isolate(what: str) -> list[str]:
    """Return the words by which one command has a network to itself, with all that it starts.

    Args:
        what: listens there, for the refusal.

    Raises:
        LabkitError: the system lets nobody of this user make one, and the network is not trusted.
    """
    if trusts_network():
        return []
    try:
        done = subprocess.run([*_alone(), "true"], capture_output=True, text=True)
    except OSError as error:
        raise refusal(what, str(error)) from None
    if done.returncode:
        raise refusal(what, done.stderr.strip())
    return _alone()


def _alone() -> list[str]:
    unshare = [shutil.which("unshare") or "unshare", *_as_root("--map-root-user"), "--net"]
    return [*unshare, sys.executable, "-P", "-m", __name__]


def entering(pid: int) -> list[str]:
    """The words before a command that is to run in the network of a process."""
    nsenter = shutil.which("nsenter") or "nsenter"
    return [nsenter, *_as_root("--preserve-credentials"), "--net", "--target", str(pid)]


def refusal(what: str, why: str) -> LabkitError:
    """The error where no such network can be made."""
    return LabkitError(
        f"{what} would listen on every interface of this machine, unencrypted and without a key, "
        "and whoever reaches it may read and change what is trained: labkit encloses them in a "
        f"network namespace, which this system refuses ({why or 'without a word'}); on a network "
        f"that you trust, give trusted_network=True or set {TRUSTED}=1"
    )


def _as_root(option: str) -> list[str]:
    """Options by which others than root are root of a namespace that is their own."""
    return [] if os.geteuid() == 0 else ["--user", option]


def main(command: list[str]) -> None:
    """Bring loopback up; be the command, or hold the network."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _FLAGS, struct.pack("16sH22x", b"lo", _UP | _RUNNING))
    if command:
        os.execvp(command[0], command)
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
