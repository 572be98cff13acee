"""Schedules as data: rounds of messages as a table, a pipeline as a small Gantt."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from labkit.common.html import card, line, table

if TYPE_CHECKING:
    from labkit.schedules import Collective, Round
    from labkit.schedules.pipeline import Table

SIZE = 4  # ranks on which a collective is laid out
MANY = 64  # messages of a round, and ticks of a pipeline, that are shown
# As in the Gantt; half transparent, so that the page's own ink is read on them.
COLORS = {"F": "rgba(86,180,233,.45)", "B": "rgba(230,159,0,.45)", "W": "rgba(0,158,115,.45)"}


def collective_html(collective: Collective) -> str:
    """The rounds of a schedule on a few ranks."""
    rounds = list(collective.schedule(SIZE))
    count = sum(map(len, rounds))
    return card(
        f"Collective on {SIZE} ranks: {len(rounds)} rounds, {count} messages", _rounds(rounds)
    )


def round_html(each: Round) -> str:
    """The messages of a round, a row each."""
    rows = _messages(each)
    rest = len(each) - len(rows)
    return card(
        repr(each).strip("<>"),
        table(rows, ["message", "chunks", "receiver"]),
        line(f"and {rest} more") if rest else "",
    )


def pipeline_html(schedule: Table) -> str:
    """A line a rank, a column a tick; F forward, B backward, W its part for the weights."""
    lines = [text.split() for text in str(schedule).splitlines()]
    width = max(map(len, lines), default=0)
    body = "".join(
        f'<tr><th scope="row" style="text-align:left">rank {rank}</th>'
        + "".join(map(_cell, [*cells, *["·"] * (width - len(cells))][:MANY]))
        + "</tr>"
        for rank, cells in enumerate(lines)
    )
    rest = line(f"the first {MANY} of {width} ticks") if width > MANY else ""
    return card(repr(schedule).strip("<>"), f"<table><tbody>{body}</tbody></table>", rest)


def _cell(text: str) -> str:
    color = COLORS.get(text[0])
    look = f' style="background:{color}"' if color else ""
    return f"<td{look}>{escape(text)}</td>"


def _rounds(rounds: Iterable[Round]) -> str:
    rows = [
        [str(number), ", ".join(f"{way} {adds} {what}" for way, what, adds in _messages(each))]
        for number, each in enumerate(rounds, 1)
    ]
    return table(rows, ["round", "messages"])


def _messages(each: Round) -> list[list[str]]:
    """Way, chunks, and what the receiver does with them."""
    return [
        [
            f"{source} → {destination}",
            f"{chunk}" if span == 1 else f"{chunk} to {chunk + span - 1}",
            "adds" if reduce else "replaces",
        ]
        for source, destination, chunk, span, reduce in each.rows()[:MANY]
    ]
