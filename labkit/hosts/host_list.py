"""A parser of host lists: Python lists, comma-separated text, and host files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import InvalidInput, short

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
        source: `["a:2", "b:2"]`, `"a:2,b:2"`, or the path of a host file with lines such as `a
            slots=2`, `a:2` or `a`, and comments after #. A host without a number of slots has one
            slot.

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
