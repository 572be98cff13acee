"""A real link of a given rate: two network namespaces, a veth pair, a queue at both ends."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from labkit.common.errors import LabkitError

ADDRESSES = ("192.0.2.1", "192.0.2.2")  # kept for examples (RFC 5737): nobody's
MTU = 1500
FRAME = MTU + 14  # bytes that a queue counts: with the Ethernet header, without what only wires see
QUEUE = 2**24  # bytes; more than a connection sends ahead, so that nothing is dropped
DEVICE = "veth0"
MEANS = ("ip", "tc")


def frames(rate: int) -> int:
    """Frames that TCP hands to the queue at once: as many as fill some 50 µs, from 1.

    A queue that wakes for every frame, each 12 µs at 1 Gb/s, comes too late on a busy machine.

    Args:
        rate: bits/s.
    """
    return max(1, round(rate / 8 * 50e-6 / FRAME))


def burst(rate: int) -> int:
    """Bytes that pass at line speed after a pause: twice what TCP hands over at once.

    With less, the link idles whenever the kernel's timer wakes the queue late; the rate/HZ of the
    manual (500 kB at 1 Gb/s, 250 Hz) is for kernels without high-resolution timers, and would
    let small messages pass at once.
    """
    return 2 * FRAME * frames(rate)


def class_of(flow: int) -> int:
    """The SO_PRIORITY by which packets find the queue of their flow, counted from 0."""
    return 1 << 16 | flow + 1


def queues(rate: int, flows: int = 1, device: str = DEVICE) -> list[str]:
    """What `tc` is told at each end: one queue, or one a flow, served in turn by `htb`."""
    each = f"burst {burst(rate)} cburst {burst(rate)}"
    if flows == 1:
        return [f"qdisc add dev {device} root tbf rate {rate}bit burst {burst(rate)} limit {QUEUE}"]
    inner = f"ceil {rate}bit {each} quantum {FRAME * frames(rate)}"
    return [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:ffff htb rate {rate}bit {each}",
        *(
            f"class add dev {device} parent 1:ffff classid 1:{flow + 1:x} "
            f"htb rate {rate // flows}bit {inner}"
            for flow in range(flows)
        ),
    ]


@contextmanager
def rate_limited_link(rate: int, flows: int = 1) -> Iterator[tuple[str, str]]:
    """Make the link; the names of its two namespaces. What was made is removed, also on Ctrl-C.

    The devices are made inside the namespaces, so that no other interface, route or namespace
    is touched, and nothing that is sent leaves the two.

    Args:
        rate: bits/s, each direction.
        flows: that share it fairly, each with a queue of its own, see `class_of`.

    Raises:
        LabkitError: iproute2 or root is missing, or the kernel refuses a part.
    """
    require_means()
    own = f"labkit-{os.getpid()}-{secrets.token_hex(3)}"
    names = (f"{own}-a", f"{own}-b")
    with ExitStack() as made:
        for name in names:
            made.callback(_command, "ip", "netns", "delete", name, check=False)
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


def inside(name: str) -> tuple[str, ...]:
    """The words before a command that is to run in a namespace."""
    return ("ip", "netns", "exec", name)


def require_means() -> None:
    """Raises: LabkitError, where iproute2 or root is missing."""
    absent = [name for name in MEANS if shutil.which(name) is None]
    if absent:
        raise LabkitError(
            f"a rate-limited link needs the commands ip and tc; missing on PATH: "
            f"{', '.join(absent)}; on Debian and Ubuntu: apt-get install iproute2"
        )
    if os.geteuid() != 0:
        raise LabkitError(
            "a rate-limited link needs root, to make two network namespaces: "
            "call it through sudo, or as root in a container or virtual machine of your own"
        )


def _command(*words: str, check: bool = True) -> None:
    # In a session of its own, so that Ctrl-C ends labkit and not the command that tidies up.
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode != 0:
        raise LabkitError(
            f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}; "
            "a rate-limited link needs a Linux kernel with network namespaces, veth and "
            "sch_tbf (sch_htb for several flows), and root with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
