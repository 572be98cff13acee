"""Network namespaces: a real link of limited rate, and a private network with loopback only.

The link consists of two network namespaces, and of a veth pair with a queue at each end.

    python -m labkit.frameworks.namespaces [COMMAND WORD…]

This program enables the loopback interface of its namespace, and then executes COMMAND. Without
COMMAND, the program keeps the namespace until its standard input ends. TensorFlow's servers and the
rendezvous of PyTorch, JAX and Horovod listen on every interface without authentication. Processes
outside a private network namespace cannot reach the ports of programs inside it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from labkit.common.errors import LabkitError
from labkit.common.machine import TRUSTED, trusts_network

# RFC 5737 reserves the addresses 192.0.2.1 and 192.0.2.2 for examples.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
MTU = 1500
# A network queue counts the bytes of a frame with its Ethernet header and without its preamble.
FRAME = MTU + 14
# The size of the queue, in bytes, exceeds the data that TCP sends ahead. The queue therefore drops
# no packet.
QUEUE = 2**24
DEVICE = "veth0"
TOOLS = ("ip", "tc")
# The numbers are SIOCSIFFLAGS, IFF_UP and IFF_RUNNING, see netdevice(7).
_FLAGS, _UP, _RUNNING = 0x8914, 0x1, 0x40
READY = "ready"


def frames(rate: int) -> int:
    """Return the number of frames that TCP passes to the queue at once.

    The number of frames is at least 1. The frames together take about 50 µs of link time. A timer
    for each frame would fire every 12 µs at 1 Gb/s. On a busy machine, such a timer would make the
    queue late.

    Args:
        rate: Link rate in bits/s.
    """
    return max(1, round(rate / 8 * 50e-6 / FRAME))


def burst(rate: int) -> int:
    """Return the burst size in bytes: how much passes without rate limit after a pause.

    The burst size is twice the bytes that TCP passes to the queue at once.

    With a smaller burst, the link would be idle whenever the kernel's timer wakes the queue late.
    The tc manual recommends a burst of rate/HZ for kernels without high-resolution timers. At 1
    Gb/s and 250 Hz, the manual recommends a burst of 500 kB. A burst of 500 kB would let small
    messages pass without delay.
    """
    return 2 * FRAME * frames(rate)


def class_of(flow: int) -> int:
    """Return the SO_PRIORITY that directs packets to the queue of a flow (counted from 0)."""
    return 1 << 16 | flow + 1


def queues(rate: int, flows: int = 1, device: str = DEVICE) -> list[str]:
    """Return the `tc` commands for each end of the link: one queue, or one `htb` queue per flow."""
    burst_options = f"burst {burst(rate)} cburst {burst(rate)}"
    if flows == 1:
        return [f"qdisc add dev {device} root tbf rate {rate}bit burst {burst(rate)} limit {QUEUE}"]
    inner = f"ceil {rate}bit {burst_options} quantum {FRAME * frames(rate)}"
    return [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:ffff htb rate {rate}bit {burst_options}",
        *(
            f"class add dev {device} parent 1:ffff classid 1:{flow + 1:x} "
            f"htb rate {rate // flows}bit {inner}"
            for flow in range(flows)
        ),
    ]


@contextmanager
def rate_limited_link(rate: int, flows: int = 1) -> Iterator[tuple[str, str]]:
    """Create the link and yield the names of its two namespaces; remove both at exit or Ctrl-C.

    The devices are created inside the namespaces. No other interface, route or namespace changes,
    and no packet leaves the namespaces of the link.

    Args:
        rate: Link rate in bits/s, for each direction.
        flows: Number of flows that share the link fairly, each with its own queue (see `class_of`);
            default: 1.

    Raises:
        LabkitError: iproute2 is missing, the user is not root, or the kernel rejects a command.
    """
    require_tools()
    prefix = f"labkit-{os.getpid()}-{secrets.token_hex(3)}"
    names = (f"{prefix}-a", f"{prefix}-b")
    with ExitStack() as cleanup:
        for name in names:
            cleanup.callback(_command, "ip", "netns", "delete", name, check=False)
            _command("ip", "netns", "add", name)
        one, other = names
        pair = f"name {DEVICE} type veth peer name {DEVICE} netns {other}".split()
        _command("ip", "-n", one, "link", "add", *pair)
        for name, address in zip(names, ADDRESSES, strict=True):
            _command("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
            size = f"mtu {MTU} gso_max_segs {frames(rate)}".split()
            _command("ip", "-n", name, "link", "set", DEVICE, *size, "up")
            _command("ip", "-n", name, "link", "set", "lo", "up")
            for queue in queues(rate, flows):
                _command("tc", "-n", name, *queue.split())
        yield names


def command_prefix(name: str) -> tuple[str, ...]:
    """Return the command prefix that runs a command in a network namespace."""
    return ("ip", "netns", "exec", name)


def require_tools() -> None:
    """Raise LabkitError if iproute2 is missing, or the user is not root."""
    absent = [name for name in TOOLS if shutil.which(name) is None]
    if absent:
        raise LabkitError(
            f"a rate-limited link needs the commands ip and tc, but PATH lacks "
            f"{', '.join(absent)}; on Debian and Ubuntu, run apt-get install iproute2"
        )
    if os.geteuid() != 0:
        raise LabkitError(
            "a rate-limited link needs root to create two network namespaces; start labkit with "
            "sudo, or as root in your own container or virtual machine"
        )


def _command(*words: str, check: bool = True) -> None:
    # Each command has its own session, so that Ctrl-C does not interrupt the cleanup.
    completed = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if check and completed.returncode != 0:
        raise LabkitError(
            f"{' '.join(words)}: "
            f"{completed.stderr.strip() or f'exit code {completed.returncode}'}; "
            "a rate-limited link needs a Linux kernel with network namespaces, veth and "
            "sch_tbf (sch_htb for several flows), and root with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )


@contextmanager
def private_network(label: str, trusted: bool = False) -> Iterator[list[str]]:
    """Create a private network, and yield the command prefix that runs a command in it.

    Args:
        label: Name of the program that listens on ports, for the error message.
        trusted: True if other processes and machines may reach the program. If True, the command
            prefix is empty.

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
    # The process `holder` ends at the end of the `with` block.
    with holder:
        # The assertion tells the type checker that stdout is a pipe.
        assert holder.stdout is not None
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
        f"network namespace, but the system refuses one ({reason or 'without a message'}); on a "
        f"network that you trust, give trusted_network=True or set {TRUSTED}=1"
    )


def _as_root(option: str) -> list[str]:
    """Return the options that give a user root rights in a new namespace; root needs none."""
    return [] if os.geteuid() == 0 else ["--user", option]


def main(command: list[str]) -> None:
    """Enable loopback; then execute the command, or wait until standard input ends."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _FLAGS, struct.pack("16sH22x", b"lo", _UP | _RUNNING))
    if command:
        os.execvp(command[0], command)
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
