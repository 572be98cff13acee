"""Hosts as people write them: a list, words between commas, or the lines of a host file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.common.errors import InvalidInput, short

# No name begins with a dash: as a word of a command it would be an option.
_NAME = r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
_WORD = re.compile(rf"{_NAME}(?::(?P<slots>[0-9]+))?")
_LINE = re.compile(rf"{_NAME}(?::(?P<slots>[0-9]+)|\s+slots\s*=\s*(?P<more>[0-9]+))?")
MOST_SLOTS = 10_000


class Host(NamedTuple):
    """A host, and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        """As mpiexec's `--host` has it."""
        return f"{self.name}:{self.slots}"


def hosts_of(given: Sequence[str] | str | Path) -> list[Host]:
    """The hosts that are meant, in their order; one that stands there twice has both its slots.

    >>> hosts_of("a:2,b")
    [Host(name='a', slots=2), Host(name='b', slots=1)]

    Args:
        given: `["a:2", "b:2"]`, `"a:2,b:2"`, or a host file, whose lines are `a slots=2`, `a:2` or
            `a`, with comments after #. Without slots a host has one.

    Raises:
        InvalidInput: no host, or words that name none.
    """
    if isinstance(given, Path) or (isinstance(given, str) and os.path.isfile(given)):
        found = [*_lines(Path(given))]
    else:
        words = given.split(",") if isinstance(given, str) else given
        found = [_host(_WORD, word, "hosts", "a:2 or a") for word in words]
    if not found:
        raise InvalidInput(f"hosts={short(given)} names no host; give some, such as a:2,b:2")
    slots: Counter[str] = Counter()
    for host in found:
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
        raise InvalidInput(f"{where}: {short(text)} is no host; allowed: {allowed}")
    slots = int(match["slots"] or match.groupdict().get("more") or 1)
    if not 1 <= slots <= MOST_SLOTS:
        raise InvalidInput(f"{where}: {short(text)}: a host has 1 to {MOST_SLOTS:,} slots")
    return Host(match["name"], slots)
