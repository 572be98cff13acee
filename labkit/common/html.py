"""Small HTML elements with escaped text, in the colours of the page that contains them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def card(title: str, *parts: str) -> str:
    """Return HTML that shows a title, which is escaped, and the HTML elements `parts` below it."""
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def line(text: str) -> str:
    """Return HTML that shows a text as one line."""
    return f"<div>{escape(text)}</div>"


def pairs(values: Mapping[str, str]) -> str:
    """Return an HTML table of names and values, or "" if there are no values."""
    return table([[name, value] for name, value in values.items()]) if values else ""


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return an HTML table; the first column contains the headers of the rows."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(first)}</th>'
        + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{lines}</tbody></table>"


def folded(summary: str, content: str) -> str:
    """Return HTML that shows a summary, and its content only after a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def preformatted(text: str) -> str:
    """Return HTML that preserves the line breaks and blanks of a text."""
    return f"<pre>{escape(text)}</pre>"


def curve(values: Sequence[float], label: str, width: int = 240, height: int = 48) -> str:
    """Return a small SVG curve of equally spaced values, or "" for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    # If all values are equal, their range is 0, so the divisor 1 replaces the range.
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
