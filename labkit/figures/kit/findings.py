"""Findings as data, and the sentences made of them for all summaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


class Markdown(str):
    """Text that a notebook renders."""

    def _repr_markdown_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Finding:
    """A value, what has it, its range, and the number of seeds behind it.

    Attributes:
        what: the head of the sentence, with names between `**`.
        who: the subject that has the value, unless the head names it.
        value: the number; None for a finding in words.
        band: the least and the greatest value, over seeds or steps.
        seeds: the number of seeds of the mean; 0 for a band over something else.
        text: formats the number and its ends.
        unit: stands after the number.
        details: further texts, in order.
        verdict: the conclusion, at the end.
    """

    what: str = ""
    who: str = ""
    value: float | None = None
    band: tuple[float, float] | None = None
    seeds: int = 0
    text: Callable[[float], str] = "{:.4g}".format
    unit: str = ""
    details: tuple[str, ...] = ()
    verdict: str = ""

    @property
    def number(self) -> str:
        """`91.20% (3 seeds, 90.10% to 92.00%)`, or empty without a value."""
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
        """The finding as `What: **who**, number; details: verdict.`"""
        whom = ", ".join(part for part in (f"**{self.who}**" * bool(self.who), self.number) if part)
        parts = "; ".join(part for part in (whom, *self.details) if part)
        return ": ".join(part for part in (self.what, parts, self.verdict) if part) + "."


def it_came(holds: bool) -> str:
    """Return the words that say whether a published result appeared."""
    return "it came" if holds else "it did **not** come"


def published(claim: str, source: str, holds: bool, *details: str) -> Finding:
    """Return the finding that a published claim holds in these runs, or not."""
    return Finding(f"**{claim}** ({source}): {it_came(holds)}", details=details)


def ratio_verdict(
    low: float, high: float, worse: str = "it does not pay", same: str = "no difference"
) -> str:
    """Return what the range of a ratio of speeds allows to say: above 1, below 1, or neither."""
    return "it pays" if low > 1 else worse if high < 1 else same


def sentences(findings: Iterable[Finding], head: str = "") -> Markdown:
    """Return a list with a sentence a finding, after an optional head."""
    lines = [f"- {finding.sentence}" for finding in findings]
    return Markdown("\n".join([head, "", *lines] if head else lines))
