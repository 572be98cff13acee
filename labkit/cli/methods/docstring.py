"""A parser of method docstrings: summary, arguments, source and differences from the source."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass

SECTIONS = ("args", "raises", "returns", "attributes", "source")
# Examples of headings are "Args:", "Args and source:", "Args, raises and source:", "Source:", … One
# heading may name several sections.
_HEAD = re.compile(r"([A-Za-z]+(?:(?:, | and )[a-z]+)*):\s*(.*)")
_DIFFERS = re.compile(r"(?:^|(?<=\.)\s+)Differs from (?:it|them)[:,]?\s+")
_ELSEWHERE = re.compile(r"as (?:for )?`(\w+)`")


@dataclass(frozen=True)
class Docstring:
    """The sections of a docstring; absent sections are "". Only the text in `args` keeps its line
    breaks."""

    summary: str
    args: str = ""
    source: str = ""
    differs: str = ""

    @property
    def source_function(self) -> str | None:
        """Name of the function whose docstring has the source: `tree` for "Source: as `tree`."."""
        found = _ELSEWHERE.match(self.source)
        return found[1] if found else None

    def argument(self, name: str, names: Iterable[str]) -> str:
        """Return an argument's description in the section "Args"; `names` lists all arguments."""
        every = "|".join(map(re.escape, names))
        # The entry of an argument begins a line, or follows a semicolon, as in "size: of all; root:
        # its place".
        starts = list(re.finditer(rf"(?:^|\n|;)\s*({every}):\s", self.args))
        ends = [*(start.start() for start in starts), len(self.args)][1:]
        parts = zip(starts, ends, strict=True)
        texts = {start[1]: self.args[start.end() : end] for start, end in parts}
        return _line(texts.get(name, "")).rstrip(".")


def parse(text: str | None) -> Docstring:
    """Parse a docstring, and convert TeX delimiters into the dollar signs of Markdown."""
    cleaned = inspect.cleandoc(text or "")
    summary, *_ = re.split(r"\n\s*\n", cleaned, maxsplit=1)
    sections = dict.fromkeys(SECTIONS, "")
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
            sections[section] += f"{rest}\n"
    # A zero byte, which occurs in no docstring, replaces the words "Differs from it".
    source, _, differs = _DIFFERS.sub("\0", _line(sections["source"])).partition("\0")
    return Docstring(_line(summary), _dollars(sections["args"]), source, differs)


def _heading(line: str) -> tuple[list[str], str] | None:
    """Return the sections that a heading line names, and the line's rest; None: no heading."""
    head = _HEAD.fullmatch(line)
    if head is None:
        return None
    sections = re.split(r", | and ", head[1].lower())
    return (sections, head[2]) if set(sections) <= set(SECTIONS) else None


def _line(text: str) -> str:
    joined = re.sub(r"(?<=\w)-\n\s*", "-", text)  # joins a word that was hyphenated at a line end
    return _dollars(" ".join(joined.split()))


def _dollars(text: str) -> str:
    return re.sub(r"\\[()]", "$", text)
