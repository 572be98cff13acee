"""Pieces of HTML: every text in them is escaped here, and takes the page's own colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def card(title: str, *parts: str) -> str:
    """Parts, which are HTML, under a title."""
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def line(text: str) -> str:
    """A line of text."""
    return f"<div>{escape(text)}</div>"


def pairs(values: Mapping[str, str]) -> str:
    """A table of names and values."""
    return table([[name, value] for name, value in values.items()]) if values else ""


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table whose first column names the rows."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(first)}</th>'
        + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{lines}</tbody></table>"


def folded(summary: str, content: str) -> str:
    """HTML that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def preformatted(text: str) -> str:
    """Text as it stands."""
    return f"<pre>{escape(text)}</pre>"


def curve(values: Sequence[float], label: str, width: int = 240, height: int = 48) -> str:
    """A small curve of values at equal distances; nothing of less than two."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    # Equal values make a flat line, and no division by nothing.
    room = (high - low) or 1.0
    points = " ".join(
        f"{2 + (width - 4) * place / (len(values) - 1):.1f},"
        f"{2 + (height - 4) * (high - value) / room:.1f}"
        for place, value in enumerate(values)
    )
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><polyline points="{points}" fill="none" '
        f'stroke="#0072B2" stroke-width="2"/></svg>{line(label)}'
    )
