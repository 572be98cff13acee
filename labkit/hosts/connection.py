"""How this machine and hosts reach each other: through which command, by which address."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.hosts import state
from labkit.hosts.scripts import AGENT_VARIABLE, TESTBED


def login() -> list[str]:
    """The words before a command for the login node; none where this machine is one.

    A testbed of this process, or one that `labkit testbed up` has left running, has its own.
    """
    named = os.environ.get(TESTBED)
    if named == "" or (named is None and "SLURM_CONF" in os.environ):
        return []
    folder = Path(named) if named else state.folder_of(state.UP)
    return [str(folder / state.LOGIN_COMMAND)] if state.state(folder) else []


def agent() -> list[str]:
    """The words of ssh, or of what is used in its place: LABKIT_AGENT, mpiexec's, a testbed's."""
    named = os.environ.get("LABKIT_AGENT") or os.environ.get(AGENT_VARIABLE)
    if named:
        return shlex.split(named)
    return [str(Path(words[0]).with_name(state.AGENT))] if (words := login()) else ["ssh"]


def addresses(names: Sequence[str]) -> list[str]:
    """The IPv4 address of each host. Raises: LabkitError, for a name that nothing resolves."""
    return [_address(name) for name in names]


def _address(name: str) -> str:
    words = [*login(), "getent", "ahostsv4", name]
    if login():  # whose /etc/hosts this machine does not see
        said = subprocess.run(words, capture_output=True, text=True).stdout.split()
        if said:
            return said[0]
    else:
        try:
            return socket.gethostbyname(name)
        except OSError:
            pass
    raise LabkitError(
        f"host {name!r} is not known here; give a name that this machine resolves, or its address"
    )


def own_address(towards: Iterable[str]) -> str:
    """The address of this machine by which those reach it; those that no way leads to are left out.

    Raises:
        LabkitError: no way leads to any, or they reach it by different addresses.
    """
    ways = {address: _source(address) for address in towards}
    found = {there: here for there, here in ways.items() if here}
    # This machine may be one of the hosts, by a name that means loopback here.
    own = sorted({here for here in found.values() if not here.startswith("127.")})
    own = own or sorted(set(found.values()))
    if len(own) == 1:
        return own[0]
    if not own:
        raise LabkitError(f"no way leads from here to {', '.join(ways) or 'any host'}")
    told = ", ".join(f"{there} by {here}" for there, here in found.items())
    raise LabkitError(
        f"hosts reach this machine by different addresses ({told}): choose one: interface='…'"
    )


def _source(address: str) -> str:
    """Of the route to an address; "" where there is none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, 9))
        except OSError:
            return ""
        return str(asked.getsockname()[0])


def answers(address: tuple[str, int], seconds: float) -> bool:
    """Whether somebody listens at an address and port; False also where no way leads there."""
    try:
        with socket.create_connection(address, seconds):
            return True
    except OSError:
        return False
