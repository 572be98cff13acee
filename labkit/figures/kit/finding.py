"""One thing that runs say, and the one maker of sentences for all readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


class Markdown(str):
    """Text that a notebook renders."""

    def _repr_markdown_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Finding:
    """What was found, of whom, as which value, and on how many seeds it rests.

    Attributes:
        what: the head of the sentence; names stand between `**`.
        value: the number; None where words alone say it.
        band: its least and its greatest, over seeds or steps.
        seeds: that the value is a mean of; 0 where the band is not one of seeds.
        text: writes a number with its unit.
        said: what else there is to say, in order.
        verdict: what may be concluded, at the end.
    """

    what: str
    value: float | None = None
    band: tuple[float, float] | None = None
    seeds: int = 1
    text: Callable[[float], str] = "{:.4g}".format
    said: tuple[str, ...] = ()
    verdict: str = ""

    @property
    def number(self) -> str:
        """`91.20% (3 seeds, 90.10% to 92.00%)`; empty without a value."""
        if self.value is None:
            return ""
        number = self.text(self.value)
        if self.band is None or self.seeds == 1 or self.band[0] == self.band[1]:
            return number
        count = f"{self.seeds} seeds, " if self.seeds else ""
        return f"{number} ({count}{self.text(self.band[0])} to {self.text(self.band[1])})"

    @property
    def sentence(self) -> str:
        """`What: value; said; said: verdict.`"""
        parts = "; ".join(part for part in (self.number, *self.said) if part)
        return ": ".join(part for part in (self.what, parts, self.verdict) if part) + "."


def sentences(findings: Iterable[Finding], head: str = "") -> Markdown:
    """A list with a sentence a finding, under a head where it has one."""
    lines = [f"- {finding.sentence}" for finding in findings]
    return Markdown("\n".join([head, "", *lines] if head else lines))
