"""Tables of pipeline schedules, and their messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from itertools import count
from typing import Generic, Literal, ParamSpec, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.common.html import card, line
from labkit.schedules.collective import DrawnFunction
from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.round import Booleans, Integers

Action: TypeAlias = Literal[
    "forward", "backward", "backward_input", "backward_weight", "send", "receive"
]
Call = ParamSpec("Call")
Row: TypeAlias = tuple[int, int, Action, int, int]
MESSAGES = ("send", "receive")
# The drawing of a pipeline schedule shows each action as one letter. As in Qi et al. 2024, the
# letter B excludes the weight gradient if the schedule has a separate action W.
LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}
# The colors of the Gantt chart are transparent, which keeps the page's text readable.
COLORS = {"F": "rgba(86,180,233,.45)", "B": "rgba(230,159,0,.45)", "W": "rgba(0,158,115,.45)"}
SHOWN = 64  # The HTML display of a schedule shows at most `SHOWN` ticks.


@dataclass(frozen=True, eq=False, repr=False)
class ScheduleTable:
    """Rows (tick, stage, action, micro-batch); each row comes after the rows that it depends on.

    Stages are numbered from the first to the last layers of the model. Rank r has the stages r, r +
    ranks, r + 2 ranks, and so on. With `chunks` = 1, each rank has one stage. Every interpreter of
    a schedule table follows these rules:

    - A rank executes its rows in their order in the table. In one tick, a rank receives, performs
      one computation, and sends.
    - A tick is a number that orders the rows; it is not a time. The result of one tick is available
      in the next tick. The interpreter of the table decides how long a computation takes.
    - A sender does not wait at `send`; a receiver waits at `receive` until the message arrives.
      Messages between two stages arrive in the order in which they were sent. Messages to a later
      stage carry activations. Messages to an earlier stage carry gradients of the loss with respect
      to activations. Stages on the same rank exchange no messages.
    - `backward` consists of `backward_input` and `backward_weight`; the previous stage needs only
    the input gradient.
    - Weights change once, after all rows of the table. If `asynchronous`, each stage updates its
      weights after each micro-batch. A backward pass uses the same weights as its forward pass.
    - If `recurrent`, micro-batches are time steps. In a recurrent schedule, a forward pass depends
      on an earlier time step. The forward pass needs the previous time step's forward pass on the
      same stage. In a recurrent schedule, a backward pass depends on a later time step. The
      backward pass needs the next time step's backward pass on the same stage.

    Args:
        name: Name of the schedule in figures.
        ranks, chunks, microbatches: Numbers of ranks, stages per rank, and micro-batches.
        tick, stage, action, microbatch: Columns of the table, of equal length.
        peer: Column with the stage at the other end of a message; -1 for computations.
        asynchronous, recurrent: `asynchronous` is whether each stage updates its weights after each
            micro-batch. `recurrent` is whether micro-batches are time steps.
        schedule: The `PipelineSchedule` that computed the table, or None.
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
    schedule: PipelineSchedule[...] | None = None

    @property
    def stages(self) -> int:
        """Number of stages: ranks times chunks."""
        return self.ranks * self.chunks

    @property
    def rank(self) -> Integers:
        """The rank that executes each row."""
        return self.stage % self.ranks

    @property
    def chunk(self) -> Integers:
        """For each row, the index of its stage among the stages of the same rank, from 0."""
        return self.stage // self.ranks

    @property
    def computes(self) -> Booleans:
        """Whether each row is a computation; the other rows are messages."""
        return self.peer < 0

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.tick)

    def rows(self) -> list[Row]:
        """Return (tick, stage, action, micro-batch, peer) of each row."""
        columns = (self.tick, self.stage, self.action, self.microbatch, self.peer)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def take(self, index: Integers | Booleans) -> ScheduleTable:
        """Return the rows that an index or a mask selects, in the order of the index."""
        # The index applies only to fields with one entry per row.
        names = ("tick", "stage", "action", "microbatch", "peer")
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def of_rank(self, rank: int) -> ScheduleTable:
        """Return the rows that the rank `rank` executes, in order."""
        return self.take(self.rank == rank)

    def bubble(self, forward: float, backward_input: float, backward_weight: float) -> float | None:
        """Return the longest idle time of a rank in s, for equally fast ranks and instant messages.

        The idle time is counted between the first and the last row of the rank. For all schedules
        except ZB-H2, counting over the whole run gives the same longest idle time. For an
        asynchronous schedule, the result is the idle time while the pipeline fills and drains. The
        result is None if the schedule's formula does not apply. The formula may exclude some tables
        and some times.

        Args:
            forward, backward_input, backward_weight: Times F, B, W in s that a rank needs for one
                micro-batch.

        Raises:
            InvalidInput: If no `PipelineSchedule` computed the table.

        Source: Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; Qi et
        al. 2024, arXiv 2401.10241. Difference from the paper: labkit limits the time of weight
        gradients. The weight-gradient time W has a bound: F for `zero_bubble`, min(F, B) for
        `zero_bubble_h2`. If W exceeds its bound, weight gradients take longer than the idle gaps.
        """
        return self._known_schedule().bubble(self, forward, backward_input, backward_weight)

    def bubble_share(
        self, forward: float, backward_input: float, backward_weight: float
    ) -> float | None:
        """Return the bubble's share of the total time: (p - 1)/(m + p - 1) for `gpipe`.

        The arguments and the errors are those of `bubble`; the result is None if `bubble` returns
        None.
        """
        idle = self.bubble(forward, backward_input, backward_weight)
        if idle is None:
            return None
        return idle / (idle + self.microbatches * (forward + backward_input + backward_weight))

    def most_in_flight(self) -> Integers:
        """Return the maximum number of activations that each rank stores at once, shape (ranks,).

        Raises:
            InvalidInput: If no `PipelineSchedule` computed the table.
        """
        bound = self._known_schedule().most(self, np.arange(self.ranks))
        # The schedule's bound on stored activations may exceed the number of activations that
        # exist.
        most: Integers = np.minimum(
            np.broadcast_to(bound, (self.ranks,)), self.microbatches * self.chunks
        )
        return most

    def _known_schedule(self) -> PipelineSchedule[...]:
        if self.schedule is None:
            raise InvalidInput(
                f"{self.name!r} has no formula, because no schedule of labkit made this table"
            )
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
        rest = line(f"first {SHOWN} of {width} ticks") if width > SHOWN else ""
        return card(repr(self).strip("<>"), f"<table><tbody>{body}</tbody></table>", rest)

    def __str__(self) -> str:
        """Return a drawing with a line per rank, a column per tick, and letters for chunks."""
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
class PipelineSchedule(DrawnFunction, Generic[Call]):
    """A pipeline schedule and its known properties; a call returns the schedule's table.

    The symbols p, m and v are the numbers of ranks, of micro-batches and of chunks per rank. The
    forward pass of one micro-batch through all chunks of a rank takes F s. Its input gradient takes
    B s, and its weight gradient W s.

    Args:
        drawing: Function from p and m (and v, if `chunked`) to the table.
        name: Key of the schedule in `PIPELINE`.
        bubble: Function (table, F, B, W) -> bubble in s, as `ScheduleTable.bubble` defines it.
        most: Function (table, rank numbers) -> upper bound on the number of stored activations
            (`ScheduleTable.most_in_flight`).
        asynchronous, recurrent: `asynchronous` is whether each stage updates its weights after each
            micro-batch. `recurrent` is whether micro-batches are time steps.
        chunked: Whether ranks may have several stages.
        scheduling: "micro-batches" if a batch is divided into micro-batches, and otherwise
            "sequential".
    """

    drawing: Callable[Call, ScheduleTable]
    name: str
    bubble: Callable[[ScheduleTable, float, float, float], float | None]
    most: Callable[[ScheduleTable, Integers], int | Integers]
    asynchronous: bool = False
    recurrent: bool = False
    chunked: bool = False
    scheduling: str = "micro-batches"

    def __post_init__(self) -> None:
        self.take_name(self.drawing)

    def __call__(self, *args: Call.args, **kwargs: Call.kwargs) -> ScheduleTable:
        """Return the table of the schedule."""
        return replace(
            self.drawing(*args, **kwargs),
            name=self.name,
            asynchronous=self.asynchronous,
            recurrent=self.recurrent,
            schedule=self,
        )

    @property
    def synchronization(self) -> str:
        """ "synchronous" if a training step uses all earlier updates, else "stale synchronous".

        With "stale synchronous", the weights of a training step lack some updates. The number of
        lacking updates is at most the number of pipeline stages.
        """
        return "stale synchronous" if self.asynchronous else "synchronous"

    @property
    def exact(self) -> bool:
        """Whether all gradients of a batch use the same weights, as in training on one process."""
        return not self.asynchronous


def pipeline(
    name: str,
    bubble: Callable[[ScheduleTable, float, float, float], float | None],
    most: Callable[[ScheduleTable, Integers], int | Integers],
    asynchronous: bool = False,
    recurrent: bool = False,
    chunked: bool = False,
    scheduling: str = "micro-batches",
) -> Callable[[Callable[Call, ScheduleTable]], PipelineSchedule[Call]]:
    """Return a decorator that makes a `PipelineSchedule` of a function and the given properties."""
    facts = (name, bubble, most, asynchronous, recurrent, chunked, scheduling)
    return lambda drawing: PipelineSchedule(drawing, *facts)


def filling(
    table: ScheduleTable, forward: float, backward_input: float, backward_weight: float
) -> float:
    """Return the time (p - 1)(F + B + W) in s to fill and drain a pipeline of p ranks."""
    return (table.ranks - 1) * (forward + backward_input + backward_weight)


# A `Work` is one computation: its action, stage and micro-batch.
Work: TypeAlias = tuple[Action, int, int]
# A `MessageRow` holds tick, phase, stage, action, micro-batch and peer.
MessageRow: TypeAlias = tuple[int, int, int, Action, int, int]


Order: TypeAlias = Callable[[int], Iterable[Work]]


def lay_out(
    name: str, order: Order, ranks: int, microbatches: int, chunks: int = 1
) -> ScheduleTable:
    """Return the table of a schedule, with each computation in its earliest possible tick.

    Args:
        name: Name of the schedule.
        order: Function that returns the computations of a rank in order.
        ranks, microbatches: Numbers of ranks and of micro-batches, at least 1.
        chunks: Number of stages per rank, at least 1.

    Raises:
        InvalidInput: If a number is below 1.
        ScheduleError: If the orders of the ranks cause a deadlock.
    """
    if min(ranks, microbatches, chunks) < 1:
        raise InvalidInput(
            f"{name} has {ranks} stages, {microbatches} micro-batches and {chunks} chunks; give "
            f"one or more of each"
        )
    orders = [list(order(rank)) for rank in range(ranks)]
    rows = [
        row
        for work, tick in _earliest(name, orders, ranks * chunks).items()
        for row in _with_messages(work, tick, ranks, ranks * chunks)
    ]
    return as_table(name, rows, ranks, microbatches, chunks)


def as_table(
    name: str, rows: list[MessageRow], ranks: int, microbatches: int, chunks: int = 1
) -> ScheduleTable:
    """Return a table from unsorted rows (tick, phase, stage, action, micro-batch, peer)."""
    # In each tick, all ranks first receive, then compute, then send.
    rows.sort(key=lambda row: (row[0], row[1], row[2] % ranks))
    tick, _, stage, action, microbatch, peer = map(np.array, zip(*rows, strict=True))
    return ScheduleTable(name, ranks, chunks, microbatches, tick, stage, action, microbatch, peer)


def _earliest(name: str, orders: list[list[Work]], stages: int) -> dict[Work, int]:
    """Return the earliest tick of each computation."""
    done: dict[Work, int] = {}
    positions = [0] * len(orders)
    for tick in count():
        runnable = [
            (rank, order[positions[rank]])
            for rank, order in enumerate(orders)
            if positions[rank] < len(order)
            and all(need in done for need in _needs(order[positions[rank]], stages))
        ]
        # If no rank has runnable work, either all work is done, or the schedule has a deadlock.
        if not runnable:
            break
        for rank, work in runnable:
            # Ranks can use a result only in the next tick.
            done[work] = tick
            positions[rank] += 1
    stuck = [
        order[place] for place, order in zip(positions, orders, strict=True) if place < len(order)
    ]
    if stuck:
        raise ScheduleError(f"{name}: deadlock: no rank can run its next computation: {stuck}")
    return done


def _needs(work: Work, stages: int) -> Iterator[Work]:
    """Yield the computations that must end before the computation `work` starts."""
    action, stage, microbatch = work
    if action == "forward":
        if stage > 0:
            yield "forward", stage - 1, microbatch
    elif action == "backward_weight":
        yield "backward_input", stage, microbatch
    else:
        yield "forward", stage, microbatch
        if stage < stages - 1:
            yield action, stage + 1, microbatch


def _with_messages(work: Work, tick: int, ranks: int, stages: int) -> Iterator[MessageRow]:
    """Yield the table row of a computation and the rows of its messages."""
    action, stage, microbatch = work
    yield tick, 1, stage, action, microbatch, -1
    # A weight gradient stays on its stage, so it needs no message.
    if ranks == 1 or action == "backward_weight":
        return
    onward = 1 if action == "forward" else -1
    if 0 <= stage - onward < stages:
        yield tick, 0, stage, "receive", microbatch, stage - onward
    if 0 <= stage + onward < stages:
        yield tick, 2, stage, "send", microbatch, stage + onward
