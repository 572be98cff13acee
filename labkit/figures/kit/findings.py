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
        what: the head of the sentence; in it names stand between `**`.
        who: of whom the value is, where the head does not say it.
        value: the number; None where words alone say it.
        band: its least and its greatest, over seeds or steps.
        seeds: over which the value is a mean; 0 where the band is the spread of something else.
        text: writes the number and its ends.
        unit: what stands behind the number.
        said: what else there is to say, in order.
        verdict: what may be concluded, at the end.
    """

    what: str = ""
    who: str = ""
    value: float | None = None
    band: tuple[float, float] | None = None
    seeds: int = 0
    text: Callable[[float], str] = "{:.4g}".format
    unit: str = ""
    said: tuple[str, ...] = ()
    verdict: str = ""

    @property
    def number(self) -> str:
        """`91.20% (3 seeds, 90.10% to 92.00%)`; empty without a value."""
        if self.value is None:
            return ""
        number = f"{self.text(self.value)}{self.unit}"
        # One seed has no spread, nor have equal values.
        if self.band is None or self.seeds == 1 or self.band[0] == self.band[1]:
            return number
        count = f"{self.seeds} seeds, " if self.seeds else "spread "
        return f"{number} ({count}{self.text(self.band[0])} to {self.text(self.band[1])})"

    @property
    def sentence(self) -> str:
        """`What: **who**, number; said: verdict.`"""
        whom = ", ".join(part for part in (f"**{self.who}**" * bool(self.who), self.number) if part)
        parts = "; ".join(part for part in (whom, *self.said) if part)
        return ": ".join(part for part in (self.what, parts, self.verdict) if part) + "."


def sentences(findings: Iterable[Finding], head: str = "") -> Markdown:
    """A list with a sentence a finding, under a head where it has one."""
    lines = [f"- {finding.sentence}" for finding in findings]
    return Markdown("\n".join([head, "", *lines] if head else lines))
