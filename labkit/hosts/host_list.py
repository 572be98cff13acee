"""A parser of host lists: Python lists, comma-separated text, and host files."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.hosts import testbed_state
from labkit.hosts.scripts import AGENT_VARIABLE, TESTBED

# A host name cannot begin with a dash, because a command would parse the name as an option.
_NAME = r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
_WORD = re.compile(rf"{_NAME}(?::(?P<slots>[0-9]+))?")
_LINE = re.compile(rf"{_NAME}(?::(?P<slots>[0-9]+)|\s+slots\s*=\s*(?P<more>[0-9]+))?")
MOST_SLOTS = 10_000


class Host(NamedTuple):
    """A host, and its number of slots: the maximum number of ranks on the host."""

    name: str
    slots: int

    def __str__(self) -> str:
        """Return the host in the syntax of the option `--host` of mpiexec."""
        return f"{self.name}:{self.slots}"


def hosts_of(source: Sequence[str] | str | Path) -> list[Host]:
    """Return hosts in the order of their first mention; the slots of repeated hosts are added.

    >>> hosts_of("a:2,b")
    [Host(name='a', slots=2), Host(name='b', slots=1)]

    Args:
        source: List `["a:2", "b:2"]`, text `"a:2,b:2"`, or path of a host file. Lines of a host
            file are like `a slots=2`, `a:2` or `a`. Comments in a host file begin with a hash sign.
            A host without a number of slots has one slot.

    Raises:
        InvalidInput: The list is empty or contains an invalid name.
    """
    if isinstance(source, Path) or (isinstance(source, str) and os.path.isfile(source)):
        hosts = [*_lines(Path(source))]
    else:
        words = source.split(",") if isinstance(source, str) else source
        hosts = [_host(_WORD, word, "hosts", "a:2 or a") for word in words]
    if not hosts:
        raise InvalidInput(
            f"hosts={short(source)} names no host; give at least one, such as a:2,b:2"
        )
    slots: Counter[str] = Counter()
    for host in hosts:
        slots[host.name] += host.slots
    return [Host(*item) for item in slots.items()]


def _lines(path: Path) -> Iterator[Host]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the host file {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            yield _host(_LINE, text, f"{path}, line {number}", "a slots=2, a:2 or a")


def _host(pattern: re.Pattern[str], text: object, where: str, allowed: str) -> Host:
    match = pattern.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InvalidInput(f"{where}: {short(text)} is not a host; allowed: {allowed}")
    slots = int(match["slots"] or match.groupdict().get("more") or 1)
    if not 1 <= slots <= MOST_SLOTS:
        raise InvalidInput(f"{where}: {short(text)}: give a host 1 to {MOST_SLOTS:,} slots")
    return Host(match["name"], slots)


def login() -> list[str]:
    """Return the prefix that runs commands on the login node; [] if this machine is the login node.

    The login node may belong to a testbed of this process. Otherwise, the login node belongs to the
    testbed that `labkit testbed up` started.
    """
    named = os.environ.get(TESTBED)
    if named == "" or (named is None and "SLURM_CONF" in os.environ):
        return []
    folder = Path(named) if named else testbed_state.folder_of(testbed_state.UP)
    return [str(folder / testbed_state.LOGIN_COMMAND)] if testbed_state.read_state(folder) else []


def agent() -> list[str]:
    """Return the command line of ssh, or of a substitute from the environment or from a testbed."""
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
    # The login node of a testbed (virtual hosts on one machine) uses another /etc/hosts than this
    # process.
    if login():
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
    # This machine may be a host whose name resolves to a loopback address. Other hosts cannot reach
    # this machine at a loopback address.
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
