"""The network of a testbed: a link of a given rate from each host to a non-blocking switch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.frameworks.namespaces import MTU, frames, queues
from labkit.hosts.host_namespaces import enter_command
from labkit.hosts.testbed_state import CONTROL, LOGIN, TestbedPlan, addresses, find_command

DEVICE = "eth0"
SWITCH = "switch"
# At most 256 testbeds exist at the same time, because each testbed has its own network
# 198.18.N.0/24.
NETWORKS = 256
NAME_EXISTS = "File exists"


def device_of(number: int) -> str:
    """Return the name of this machine's network device for the testbed `number`."""
    return f"labkit-bed{number}"


def port(host: str) -> str:
    """Return the name of the switch's network device for a host."""
    return f"port-{host}"


def claim_network(control: int) -> int:
    """Link this machine to a host, and return the number of the new network.

    Two testbeds cannot claim the same number, because names of network devices are unique.

    Args:
        control: Id of a process in the namespaces of the host `control`.
    """
    for number in range(NETWORKS):
        peer = f"type veth peer name {LOGIN} netns {control}"
        line = f"link add {device_of(number)} {peer}"
        result = _run_batch([line])
        if result.returncode == 0:
            return number
        if NAME_EXISTS not in result.stderr:
            raise _error([line], result.stderr)
    raise LabkitError(
        f"{NETWORKS} testbeds run on this machine, which is the maximum; end one of them"
    )


def release_network(number: int) -> None:
    """Remove the link of `claim_network` now, because the kernel would remove it only later."""
    _run_batch([f"link delete {device_of(number)}"])


def connect_hosts(plan: TestbedPlan, number: int, control: int, hosts: Mapping[str, int]) -> None:
    """Connect this machine and all hosts to the switch, and assign their IP addresses.

    Packets from a host wait in a queue of the host's device. Packets to a host wait in a queue of
    the switch.

    Args:
        plan: Parameters of the testbed.
        number: Number N of the testbed's network 198.18.N.0/24.
        control: Id of a process in the namespaces of the host `control`.
        hosts: For each host name, the id of a process in the host's namespaces.
    """
    address_of = addresses(plan, number)
    outside = device_of(number)
    _configure(
        None, [f"address add {address_of[LOGIN]}/24 dev {outside}", f"link set {outside} up"]
    )
    size = f"mtu {MTU} gso_max_segs {frames(plan.rate)}"
    _configure(
        control,
        [
            "link set lo up",
            f"link add {SWITCH} type bridge",
            f"address add {address_of[CONTROL]}/24 dev {SWITCH}",
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
    _configure(
        control, [line for name in hosts for line in queues(plan.rate, device=port(name))], "tc"
    )
    for name, pid in hosts.items():
        address = f"address add {address_of[name]}/24 dev {DEVICE}"
        _configure(pid, ["link set lo up", address, f"link set {DEVICE} {size} up"])
        _configure(pid, queues(plan.rate, device=DEVICE), "tc")


def set_link(control: int, host: str, up: bool) -> None:
    """Set the network link of a host up or down."""
    _configure(control, [f"link set {port(host)} {'up' if up else 'down'}"])


def bytes_sent(pid: int) -> int:
    """Return the total bytes that a host has sent over its link, including packet headers.

    Args:
        pid: Id of a process in the host's namespaces.
    """
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            # In /proc/net/dev, the first eight counters are for received packets. The ninth counter
            # is the number of sent bytes.
            return int(counters.split()[8])
    raise LabkitError(f"the host has lost its network device {DEVICE}")


def _configure(pid: int | None, lines: Sequence[str], command: str = "ip") -> None:
    result = _run_batch(lines, pid, command)
    if result.returncode:
        raise _error(lines, result.stderr)


def _run_batch(
    lines: Sequence[str], pid: int | None = None, command: str = "ip"
) -> subprocess.CompletedProcess[str]:
    """Run commands of `ip` or `tc` in the network namespace of process `pid` or of this process."""
    inside = enter_command(pid, ["--net"]) if pid else []
    words = [*inside, find_command(command) or command, "-batch", "-"]
    return subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)


def _error(lines: Sequence[str], errors: str) -> LabkitError:
    reason = next(iter(errors.strip().splitlines()), "no reason given")
    number = re.search(r"Command failed -:(\d+)", errors)
    line = lines[int(number[1]) - 1] if number else "; ".join(lines)
    return LabkitError(
        f"the links of a testbed cannot be created: {reason} ({line}); they need a Linux kernel "
        "with veth, bridge and sch_tbf, and root with CAP_NET_ADMIN"
    )
