"""A named line of a figure that is not about runs: an algorithm, a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from labkit.figures.kit.entries import DASHES, PALETTE, SYMBOLS, safe_text


@dataclass(frozen=True)
class Line:
    """How a name is coloured, dashed and marked: the same in every panel and in the legend."""

    label: str
    color: str
    dash: str
    symbol: str

    @property
    def style(self) -> dict[str, Any]:
        """What every trace of the line carries: a click on the legend hides them all."""
        return {"legendgroup": self.label, "name": safe_text(self.label)}


def lines(names: Iterable[str]) -> dict[str, Line]:
    """A line for each name, in order; neighbours differ in colour and in symbol."""
    return {
        name: Line(
            label=name,
            color=PALETTE[place % len(PALETTE)],
            dash=DASHES[place // len(PALETTE) % len(DASHES)],
            symbol=SYMBOLS[place % len(SYMBOLS)],
        )
        for place, name in enumerate(dict.fromkeys(names))
    }
