"""A pipeline schedule as data: which stage does what with which micro-batch, tick by tick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.html import card, line
from labkit.schedules.round import Booleans, Integers

Action: TypeAlias = Literal[
    "forward", "backward", "backward_input", "backward_weight", "send", "receive"
]
Row: TypeAlias = tuple[int, int, Action, int, int]
MESSAGES = ("send", "receive")
# What a drawing writes; after Qi 2024, B is the input part where W follows.
LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
# As in the Gantt; half transparent, so that the page's own ink is read on them.
COLORS = {"F": "rgba(86,180,233,.45)", "B": "rgba(230,159,0,.45)", "W": "rgba(0,158,115,.45)"}
SHOWN = 64  # ticks that are shown


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Rows (tick, stage, action, micro-batch), sorted so that each comes after what it needs.

    Stages are numbered along the model; rank r holds the stages r, r + ranks, r + 2 ranks, …: one
    each where `chunks` is 1. Semantics, the same for every reader:

    - A rank carries out its rows in order. In a tick it receives, computes once, and sends.
    - A tick is a place in the order, not a time: what is computed in one tick can be used in the
      next. How long a computation takes is the reader's to know.
    - `send` does not wait; `receive` waits. Messages from one stage to another stay in order.
      To a later stage goes the activation, to an earlier one the gradient with respect to it.
      Between stages of the same rank there is no message.
    - `backward` is both `backward_input`, for which the stage before waits, and `backward_weight`.
    - Weights change once, after all rows. Where `asynchronous`, each stage changes its own after
      each of its micro-batches, and a backward computes with the weights of its forward.
    - Where `recurrent`, micro-batches are time steps: a forward also needs the stage's forward of
      the step before, a backward the stage's backward of the step after.

    Args: name: in `PIPELINE`; ranks, chunks, microbatches: how many; columns of equal length:
    tick; stage; action; microbatch; peer: the stage at the other end of a message, else -1.
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    tick: Integers
    stage: Integers
    action: NDArray[np.str_]
    microbatch: Integers
    peer: Integers
    asynchronous: bool = False
    recurrent: bool = False

    @property
    def stages(self) -> int:
        """Number of stages: of ranks times chunks."""
        return self.ranks * self.chunks

    @property
    def rank(self) -> Integers:
        """Who carries out each row."""
        return self.stage % self.ranks

    @property
    def chunk(self) -> Integers:
        """Which of its rank's stages each row is about, from 0."""
        return self.stage // self.ranks

    @property
    def computes(self) -> Booleans:
        """Which rows are neither send nor receive."""
        return self.peer < 0

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tick)

    def rows(self) -> list[Row]:
        """(tick, stage, action, micro-batch, peer) of each row."""
        columns = (self.tick, self.stage, self.action, self.microbatch, self.peer)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def take(self, index: Integers | Booleans) -> Table:
        """The rows that an index or a mask selects, in its order."""
        names = ("tick", "stage", "action", "microbatch", "peer")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def of_rank(self, rank: int) -> Table:
        """The rows that this rank carries out, in order."""
        return self.take(self.rank == rank)

    def forwards(self) -> Table:
        """The forward pass alone: what inference runs."""
        onward = np.where(self.action == "send", self.peer > self.stage, self.peer < self.stage)
        return self.take(np.where(self.computes, self.action == "forward", onward))

    def __repr__(self) -> str:
        return f"<{self.name}: {self.stages} stages on {self.ranks} ranks, {len(self)} rows>"

    def _repr_html_(self) -> str:
        lines = [text.split() for text in str(self).splitlines()]
        width = max(map(len, lines), default=0)
        body = "".join(
            f'<tr><th scope="row" style="text-align:left">rank {rank}</th>'
            + "".join(map(_cell, [*cells, *["·"] * (width - len(cells))][:SHOWN]))
            + "</tr>"
            for rank, cells in enumerate(lines)
        )
        rest = line(f"the first {SHOWN} of {width} ticks") if width > SHOWN else ""
        return card(repr(self).strip("<>"), f"<table><tbody>{body}</tbody></table>", rest)

    def __str__(self) -> str:
        """The drawing: a line a rank, a column a tick; letters a, b, … are a rank's chunks."""
        cells = np.full((self.ranks, int(self.tick.max(initial=-1)) + 1), "·", dtype="<U8")
        for tick, stage, action, microbatch, peer in self.rows():
            if peer < 0:
                chunk = chr(ord("a") + stage // self.ranks) if self.chunks > 1 else ""
                cells[stage % self.ranks, tick] = f"{LETTERS[action]}{microbatch}{chunk}"
        width = max((len(cell) for cell in cells.flat), default=0)
        return "\n".join(
            " ".join(cell.ljust(width) for cell in line).rstrip(" ·") for line in cells
        )


def _cell(text: str) -> str:
    color = COLORS.get(text[0])
    look = f' style="background:{color}"' if color else ""
    return f"<td{look}>{escape(text)}</td>"


Pipeline: TypeAlias = Callable[[int, int], Table]
