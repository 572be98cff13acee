"""Findings of text summaries as data, and their conversion to sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


class Markdown(str):
    """Text that a notebook renders as Markdown."""

    def _repr_markdown_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Finding:
    """One statement of a text summary: a subject, its value with a range, and a conclusion.

    Attributes:
        head: Start of the sentence, before the colon; `**` marks bold names.
        subject: The run or other thing that the value describes; empty if the head names it.
        value: Number in the unit that `text` expects; None if the finding has no number.
        band: Least and greatest value over seeds or training steps; None: there is no range.
        seeds: Number of seeds over which the value is a mean; 0 if the band is not over seeds.
        text: Function that formats the number and the ends of the band.
        unit: Unit of measurement, written after the number.
        details: Further texts after the number, in order.
        verdict: The conclusion, which ends the sentence.
    """

    head: str = ""
    subject: str = ""
    value: float | None = None
    band: tuple[float, float] | None = None
    seeds: int = 0
    text: Callable[[float], str] = "{:.4g}".format
    unit: str = ""
    details: tuple[str, ...] = ()
    verdict: str = ""

    @property
    def number(self) -> str:
        """The value with its range: `91.20% (3 seeds, 90.10% to 92.00%)`; empty without a value."""
        if self.value is None:
            return ""
        number = f"{self.text(self.value)}{self.unit}"
        # The range is omitted for a single seed and for equal values, because there is no spread.
        if self.band is None or self.seeds == 1 or self.band[0] == self.band[1]:
            return number
        count = f"{self.seeds} seeds, " if self.seeds else "spread "
        return f"{number} ({count}{self.text(self.band[0])} to {self.text(self.band[1])})"

    @property
    def sentence(self) -> str:
        """The finding as a sentence: `Head: **subject**, number; details: verdict.`"""
        subject = ", ".join(
            part for part in (f"**{self.subject}**" * bool(self.subject), self.number) if part
        )
        parts = "; ".join(part for part in (subject, *self.details) if part)
        return ": ".join(part for part in (self.head, parts, self.verdict) if part) + "."


def reproduced_text(holds: bool) -> str:
    """Return the phrase that states whether the runs reproduce a published result."""
    return "reproduced" if holds else "**not** reproduced"


def published(claim: str, source: str, holds: bool, *details: str) -> Finding:
    """Return a finding that states whether the runs reproduce a published claim."""
    return Finding(f"**{claim}** ({source}): {reproduced_text(holds)}", details=details)


def ratio_verdict(
    low: float, high: float, worse: str = "it does not pay", same: str = "no difference"
) -> str:
    """Return the conclusion for a speed ratio: its range is above 1, below 1, or includes 1."""
    return "it pays" if low > 1 else worse if high < 1 else same


def sentences(findings: Iterable[Finding], head: str = "") -> Markdown:
    """Return a Markdown list with one sentence per finding, after an optional head line."""
    lines = [f"- {finding.sentence}" for finding in findings]
    return Markdown("\n".join([head, "", *lines] if head else lines))
