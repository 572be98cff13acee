"""The links of a testbed: each host has one of the given rate to a switch that never blocks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.frameworks.namespaces import MTU, frames, queues
from labkit.hosts.host_namespaces import entering
from labkit.hosts.plan import CONTROL, LOGIN, Plan, addresses
from labkit.hosts.requirements import found

DEVICE = "eth0"  # of a host
SWITCH = "switch"
NETWORKS = 256  # among which a testbed takes one that no other has
TAKEN = "File exists"


def device_of(number: int) -> str:
    """The device of this machine that leads into the testbed on the network of that number."""
    return f"labkit-bed{number}"


def port(host: str) -> str:
    """The switch's device to a host."""
    return f"port-{host}"


def claim(control: int) -> int:
    """Make the link between this machine and the control; the number of the testbed's network.

    Its name is the claim: two testbeds at once cannot both make a device of one name.

    Args:
        control: a process in the control's namespaces.
    """
    for number in range(NETWORKS):
        peer = f"type veth peer name {LOGIN} netns {control}"
        line = f"link add {device_of(number)} {peer}"
        done = _ip([line])
        if done.returncode == 0:
            return number
        if TAKEN not in done.stderr:
            raise _refused([line], done.stderr)
    raise LabkitError(f"{NETWORKS} testbeds are up on this machine, and no more can be")


def release(number: int) -> None:
    """Remove that link. It also goes by itself, a moment after the control has ended."""
    _ip([f"link delete {device_of(number)}"])


def join(plan: Plan, number: int, control: int, hosts: Mapping[str, int]) -> None:
    """Join this machine and all hosts to the switch, and give them their addresses.

    What a host sends waits in a queue of its own device; what it receives, in one of the switch.

    Args:
        control, hosts: a process in the namespaces of each.
    """
    place = addresses(plan, number)
    outside = device_of(number)
    _tell(None, [f"address add {place[LOGIN]}/24 dev {outside}", f"link set {outside} up"])
    size = f"mtu {MTU} gso_max_segs {frames(plan.rate)}"
    _tell(
        control,
        [
            "link set lo up",
            f"link add {SWITCH} type bridge",
            f"address add {place[CONTROL]}/24 dev {SWITCH}",
            f"link set {SWITCH} up",
            f"link set {LOGIN} master {SWITCH} up",
            *(
                line
                for name, pid in hosts.items()
                for line in (
                    f"link add {port(name)} type veth peer name {DEVICE} netns {pid}",
                    f"link set {port(name)} master {SWITCH} {size} up",
                )
            ),
        ],
    )
    _tell(control, [line for name in hosts for line in queues(plan.rate, device=port(name))], "tc")
    for name, pid in hosts.items():
        address = f"address add {place[name]}/24 dev {DEVICE}"
        _tell(pid, ["link set lo up", address, f"link set {DEVICE} {size} up"])
        _tell(pid, queues(plan.rate, device=DEVICE), "tc")


def set_link(control: int, host: str, up: bool) -> None:
    """Pull the cable of a host out of the switch, or put it back."""
    _tell(control, [f"link set {port(host)} {'up' if up else 'down'}"])


def sent(pid: int) -> int:
    """Bytes that a host has sent over its link, with the headers of each packet.

    Args:
        pid: a process in its namespaces.
    """
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counted = line.partition(":")
        if name.strip() == DEVICE:
            return int(counted.split()[8])  # after eight columns of what it has received
    raise LabkitError(f"the host has no device {DEVICE} any more")


def _tell(pid: int | None, lines: Sequence[str], command: str = "ip") -> None:
    done = _ip(lines, pid, command)
    if done.returncode:
        raise _refused(lines, done.stderr)


def _ip(
    lines: Sequence[str], pid: int | None = None, command: str = "ip"
) -> subprocess.CompletedProcess[str]:
    """Tell `ip`, or `tc`, some lines in the network of a process, or in this one's."""
    inside = entering(pid, ["--net"]) if pid else []
    words = [*inside, found(command) or command, "-batch", "-"]
    return subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)


def _refused(lines: Sequence[str], said: str) -> LabkitError:
    reason = next(iter(said.strip().splitlines()), "no reason given")
    number = re.search(r"Command failed -:(\d+)", said)
    line = lines[int(number[1]) - 1] if number else "; ".join(lines)
    return LabkitError(
        f"the links of a testbed cannot be made: {reason} ({line}); they need a Linux kernel with "
        "veth, bridge and sch_tbf, and root with CAP_NET_ADMIN"
    )
