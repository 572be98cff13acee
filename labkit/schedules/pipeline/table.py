"""A pipeline schedule as data: which stage does what with which micro-batch, tick by tick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from typing import Generic, Literal, ParamSpec, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.common.html import card, line
from labkit.schedules.collective import Drawn
from labkit.schedules.round import Booleans, Integers

Action: TypeAlias = Literal[
    "forward", "backward", "backward_input", "backward_weight", "send", "receive"
]
Call = ParamSpec("Call")
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

    Args: name: what figures call it; ranks, chunks, microbatches: how many; columns of equal
    length: tick; stage; action; microbatch; peer: the stage at the other end of a message, else -1;
    schedule: of which it is the table, or None.
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
    schedule: Pipeline[...] | None = None

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
        # The columns; what is known of the whole table stays.
        names = ("tick", "stage", "action", "microbatch", "peer")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def of_rank(self, rank: int) -> Table:
        """The rows that this rank carries out, in order."""
        return self.take(self.rank == rank)

    def bubble(self, forward: float, backward_input: float, backward_weight: float) -> float | None:
        """Seconds that the rank that waits longest does nothing; ranks equal, messages free.

        The same from a rank's first row to its last as over all of the time, but for ZB-H2; of an
        asynchronous schedule between filling and draining. None where the form does not hold.

        Args: forward, backward_input, backward_weight: F, B, W in s, of a micro-batch on a rank.
        Raises: InvalidInput, for a table of no known schedule.
        Source: Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; Qi et
        al. 2024, arXiv 2401.10241. Differs from it: the last says no bounds for W; beyond those of
        `zero_bubble` and `zero_bubble_h2` the weight parts are too long for the gaps.
        """
        return self._known().bubble(self, forward, backward_input, backward_weight)

    def bubble_share(
        self, forward: float, backward_input: float, backward_weight: float
    ) -> float | None:
        """The bubble as a share of all time, (p - 1)/(m + p - 1) of `gpipe`: as `bubble`."""
        lost = self.bubble(forward, backward_input, backward_weight)
        if lost is None:
            return None
        # All time of a rank is what it computes, and what it waits.
        return lost / (lost + self.microbatches * (forward + backward_input + backward_weight))

    def most_in_flight(self) -> Integers:
        """The bound of what `in_flight` counts, rank by rank, shape (ranks,).

        Raises: InvalidInput, for a table of no known schedule.
        """
        bound = self._known().most(self, np.arange(self.ranks))
        # No more than there are, however many a schedule would let in.
        most: Integers = np.minimum(
            np.broadcast_to(bound, (self.ranks,)), self.microbatches * self.chunks
        )
        return most

    def _known(self) -> Pipeline[...]:
        if self.schedule is None:
            raise InvalidInput(f"no formula for {self.name!r}: no known schedule made it")
        return self.schedule

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


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline(Drawn, Generic[Call]):
    """A pipeline schedule and what is known of it; called as the function that draws its table.

    With p ranks, m micro-batches, v chunks a rank, and F, B, W the seconds of forward, input and
    weight part of the backward of a micro-batch on a rank (in all of its chunks):

    Args: drawing: p, m (and v, where `chunked`) -> table; name: in `PIPELINE`; bubble: (table, F,
    B, W) -> see `Table.bubble`; most: (table, numbers of ranks) -> see `Table.most_in_flight`;
    asynchronous, recurrent: see `Table`; chunked: whether ranks may hold several stages;
    scheduling: whether parts of a batch follow each other, or all of it goes, "sequential".
    """

    drawing: Callable[Call, Table]
    name: str
    bubble: Callable[[Table, float, float, float], float | None]
    most: Callable[[Table, Integers], int | Integers]
    asynchronous: bool = False
    recurrent: bool = False
    chunked: bool = False
    scheduling: str = "micro-batches"

    def __post_init__(self) -> None:
        self.take_name(self.drawing)

    def __call__(self, *args: Call.args, **kwargs: Call.kwargs) -> Table:
        """The table."""
        return replace(
            self.drawing(*args, **kwargs),
            name=self.name,
            asynchronous=self.asynchronous,
            recurrent=self.recurrent,
            schedule=self,
        )

    @property
    def synchronization(self) -> str:
        """Whether all updates of a step are there; else as many as the depth may be missing."""
        return "stale synchronous" if self.asynchronous else "synchronous"

    @property
    def exact(self) -> bool:
        """Whether all gradients are of the same weights, so that one process would find them."""
        return not self.asynchronous


def pipeline(
    name: str,
    bubble: Callable[[Table, float, float, float], float | None],
    most: Callable[[Table, Integers], int | Integers],
    asynchronous: bool = False,
    recurrent: bool = False,
    chunked: bool = False,
    scheduling: str = "micro-batches",
) -> Callable[[Callable[Call, Table]], Pipeline[Call]]:
    """Stands above the function that draws a schedule and says what is known of it."""
    facts = (name, bubble, most, asynchronous, recurrent, chunked, scheduling)
    return lambda drawing: Pipeline(drawing, *facts)


def filling(table: Table, forward: float, backward_input: float, backward_weight: float) -> float:
    """(p - 1)(F + B + W): ranks wait until the first micro-batch has come, and gone back."""
    return (table.ranks - 1) * (forward + backward_input + backward_weight)
