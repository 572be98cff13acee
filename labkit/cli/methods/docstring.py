"""What a docstring says of a method: one line, its arguments, its source, what differs from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass

SECTIONS = ("args", "raises", "returns", "attributes", "source")
# "Args:", "Args and source:", "Args, raises and source:", "Source:", …
# Short sections of the house stand in one line: "Args and source:".
_HEAD = re.compile(r"([A-Za-z]+(?:(?:, | and )[a-z]+)*):\s*(.*)")
_DIFFERS = re.compile(r"(?:^|(?<=\.)\s+)Differs from (?:it|them)[:,]?\s+")
_ELSEWHERE = re.compile(r"as (?:for )?`(\w+)`")


@dataclass(frozen=True)
class Docstring:
    """A docstring in parts; those that it does not have are empty. Lines are joined, `args` not."""

    summary: str
    args: str = ""
    source: str = ""
    differs: str = ""

    @property
    def elsewhere(self) -> str | None:
        """What has the source instead: `tree` for "Source: as `tree`."."""
        found = _ELSEWHERE.match(self.source)
        return found[1] if found else None

    def argument(self, name: str, names: Iterable[str]) -> str:
        """What is said of one argument; `names` are those of all, at which its text ends."""
        every = "|".join(map(re.escape, names))
        # A name begins a line, or stands behind a semicolon: "size: of all; root: its place".
        starts = list(re.finditer(rf"(?:^|\n|;)\s*({every}):\s", self.args))
        ends = [*(start.start() for start in starts), len(self.args)][1:]
        parts = zip(starts, ends, strict=True)
        said = {start[1]: self.args[start.end() : end] for start, end in parts}
        return _line(said.get(name, "")).rstrip(".")


def parse(text: str | None) -> Docstring:
    """Read a docstring; TeX is written as Markdown has it, in dollars."""
    cleaned = inspect.cleandoc(text or "")
    summary, *_ = re.split(r"\n\s*\n", cleaned, maxsplit=1)
    found = dict.fromkeys(SECTIONS, "")
    current: list[str] = []
    for line in cleaned.splitlines():
        if head := _heading(line):
            current, rest = head
        elif line.startswith("Differs from") and not current:
            current, rest = ["source"], line
        elif not line.strip():
            current, rest = [], ""
        else:
            rest = line
        for section in current:
            found[section] += f"{rest}\n"
    # A zero byte, which no docstring has, marks the place once the words are gone.
    source, _, differs = _DIFFERS.sub("\0", _line(found["source"])).partition("\0")
    return Docstring(_line(summary), _dollars(found["args"]), source, differs)


def _heading(line: str) -> tuple[list[str], str] | None:
    """The sections that begin with a line, and the rest of the line."""
    head = _HEAD.fullmatch(line)
    if head is None:
        return None
    sections = re.split(r", | and ", head[1].lower())
    return (sections, head[2]) if set(sections) <= set(SECTIONS) else None


def _line(text: str) -> str:
    joined = re.sub(r"(?<=\w)-\n\s*", "-", text)  # a word that was divided stays one
    return _dollars(" ".join(joined.split()))


def _dollars(text: str) -> str:
    return re.sub(r"\\[()]", "$", text)
