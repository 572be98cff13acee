"""Connections from this machine to hosts: login node, substitute for ssh, and addresses."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.hosts import testbed_state
from labkit.hosts.scripts import AGENT_VARIABLE, TESTBED


def login() -> list[str]:
    """Return the prefix that runs commands on the login node; [] if this machine is the login node.

    The login node belongs to a testbed of this process, or to the testbed that `labkit testbed up`
    started.
    """
    named = os.environ.get(TESTBED)
    if named == "" or (named is None and "SLURM_CONF" in os.environ):
        return []
    folder = Path(named) if named else testbed_state.folder_of(testbed_state.UP)
    return [str(folder / testbed_state.LOGIN_COMMAND)] if testbed_state.read_state(folder) else []


def agent() -> list[str]:
    """Return the command line of ssh, or of its substitute that a variable or a testbed sets."""
    named = os.environ.get("LABKIT_AGENT") or os.environ.get(AGENT_VARIABLE)
    if named:
        return shlex.split(named)
    return [str(Path(words[0]).with_name(testbed_state.AGENT))] if (words := login()) else ["ssh"]


def addresses(names: Sequence[str]) -> list[str]:
    """Return the IPv4 address of each host.

    Raises:
        LabkitError: A name cannot be resolved.
    """
    return [_address(name) for name in names]


def _address(name: str) -> str:
    words = [*login(), "getent", "ahostsv4", name]
    if login():  # a testbed's login node uses another /etc/hosts than this process
        answer = subprocess.run(words, capture_output=True, text=True).stdout.split()
        if answer:
            return answer[0]
    else:
        try:
            return socket.gethostbyname(name)
        except OSError:
            pass
    raise LabkitError(
        f"host {name!r} is unknown; give a name that this machine resolves, or its address"
    )


def local_address(towards: Iterable[str]) -> str:
    """Return the address of this machine for connections from the given hosts.

    Args:
        towards: Addresses of the hosts; addresses without a route are ignored.

    Raises:
        LabkitError: No address has a route, or hosts need different addresses of this machine.
    """
    ways = {address: _source(address) for address in towards}
    sources = {target: source for target, source in ways.items() if source}
    # Loopback addresses are ignored, because this machine may be one of the hosts, under a name
    # that resolves to a loopback address.
    candidates = sorted({source for source in sources.values() if not source.startswith("127.")})
    candidates = candidates or sorted(set(sources.values()))
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise LabkitError(f"this machine has no route to {', '.join(ways) or 'any host'}")
    routes = ", ".join(f"{target} by {source}" for target, source in sources.items())
    raise LabkitError(
        f"hosts reach this machine by different addresses ({routes}); choose one with interface='…'"
    )


def _source(address: str) -> str:
    """Return this machine's source address on the route to `address`; "" if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def is_reachable(address: tuple[str, int], seconds: float) -> bool:
    """Return whether a TCP connection to an (address, port) succeeds within some seconds."""
    try:
        with socket.create_connection(address, seconds):
            return True
    except OSError:
        return False
