"""A collective: a schedule, what the ranks hold at its end, and what is known of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import WRAPPER_ASSIGNMENTS, partial
from typing import Generic, Literal, NoReturn, ParamSpec, SupportsIndex, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.html import card, table
from labkit.schedules.formulas import Cost, Counts
from labkit.schedules.round import Integers, Round, messages_of

SUM = -1  # the sum of the chunk over all ranks
ANY = -2  # whatever: the collective promises nothing here
SHOWN = 4  # ranks on which a collective is laid out where it is displayed

Call = ParamSpec("Call")
Ends: TypeAlias = Callable[[int, int], Integers]


class Drawn:
    """A function with a drawing in its docstring, and facts beside it as fields.

    It goes by the function's own name and documentation.
    """

    def take_name(self, drawing: Callable[..., object]) -> None:
        """Name and documentation of the function."""
        for name in WRAPPER_ASSIGNMENTS:
            if hasattr(drawing, name):  # not of a `partial`
                object.__setattr__(self, name, getattr(drawing, name))
        # The dataclass is frozen; `inspect.signature` follows this to the function's own arguments.
        object.__setattr__(self, "__wrapped__", drawing)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        # A pickled function is its name, and so is what stands in the module in its place.
        name = getattr(self, "__name__", "")
        if getattr(sys.modules.get(self.__module__), name, None) is self:
            return str(name)
        return super().__reduce_ex__(protocol)

    @property
    def paper(self) -> str:
        """What the docstring names as its source."""
        return re.sub(r"\s+", " ", self.__doc__ or "").partition("ource: ")[2].strip()


def _unknown(*_: object) -> NoReturn:
    raise InvalidInput("nobody has written down a formula for this schedule")


@dataclass(frozen=True, eq=False, repr=False)
class Collective(Drawn, Generic[Call]):
    """A schedule and its promise; called as the function that draws it.

    Args: schedule: size -> rounds; ends: (size, chunks) -> table of shape (size, chunks) that
    says what each rank holds in each chunk at the end: `SUM`, `ANY`, or the rank r ≥ 0 whose
    chunk it was at the start; counts: what p ranks send by the textbook; cost: its seconds by the
    textbook; ways: the ways through it on one switch, of which the slowest is what it takes there
    (default: the textbook's); layout: what of a network it can be laid out on, the argument by
    which it takes that; gathers: an allgather that carries each rank's own part to all, where the
    schedule ends with one; between: the rounds between hosts, of a schedule that begins and ends
    inside them: first the i-th ranks of hosts add up part i of the least host's many parts, last
    they copy it to the others, as shared memory does, too; switches: how many nodes of the network
    take part, numbered after the ranks.
    """

    schedule: Callable[Call, Iterable[Round]]
    ends: Ends
    counts: Callable[..., Counts] = _unknown
    cost: Callable[[int], Cost] = _unknown
    ways: Callable[[int], tuple[Cost, ...]] = _unknown
    layout: Literal["hosts", "links"] | None = None
    gathers: Callable[[int], Iterable[Round]] | None = None
    between: Callable[..., Iterable[Round]] | None = None
    switches: Callable[..., int] = lambda size, **_: 0

    def __post_init__(self) -> None:
        self.take_name(self.schedule)
        if self.ways is _unknown:
            object.__setattr__(self, "ways", lambda size: (self.cost(size),))

    def __call__(self, *args: Call.args, **kwargs: Call.kwargs) -> Iterable[Round]:
        """The rounds."""
        return self.schedule(*args, **kwargs)

    def _repr_html_(self) -> str:
        drawing: Callable[..., Iterable[Round]] = self.schedule
        rounds = list(drawing(SHOWN))
        told = [
            ", ".join(f"{way} {adds} {what}" for way, what, adds in messages_of(each))
            for each in rounds
        ]
        rows = [[str(number), messages] for number, messages in enumerate(told, 1)]
        count = sum(map(len, rounds))
        return card(
            f"Collective on {SHOWN} ranks: {len(rounds)} rounds, {count} messages",
            table(rows, ["round", "messages"]),
        )


def everywhere(value: int) -> Ends:
    """All ranks hold the same in all chunks."""
    return lambda size, chunks: np.full((size, chunks), value)


def at_root(held: Callable[[int], Integers | int]) -> Ends:
    """Rank 0 holds this (of so many chunks), and nothing is promised of the others."""

    def ends(size: int, chunks: int) -> Integers:
        table = np.full((size, chunks), ANY)
        table[0] = held(chunks)
        return table

    return ends


def at_home(value: int) -> Ends:
    """Rank r holds this in chunk r, and nothing is promised of its other chunks."""
    return lambda size, chunks: np.where(np.eye(size, chunks, dtype=np.bool_), value, ANY)


def collective(
    ends: Ends,
    counts: Callable[..., Counts],
    cost: Callable[[int], Cost] = _unknown,
    ways: Callable[[int], tuple[Cost, ...]] = _unknown,
    layout: Literal["hosts", "links"] | None = None,
    gathers: Callable[[int], Iterable[Round]] | None = None,
    between: Callable[..., Iterable[Round]] | None = None,
    switches: Callable[..., int] = lambda size, **_: 0,
) -> Callable[[Callable[Call, Iterable[Round]]], Collective[Call]]:
    """Stands above a schedule and says what is known of it, see `Collective`."""
    known = (ends, counts, cost, ways, layout, gathers, between, switches)
    return lambda drawing: Collective(drawing, *known)


def allreduce(schedule: Callable[Call, Iterable[Round]]) -> Collective[Call]:
    """An allreduce promises the sum, everywhere; of anybody's own nothing else is known."""
    return schedule if isinstance(schedule, Collective) else Collective(schedule, everywhere(SUM))


def count_switches(schedule: Callable[..., Iterable[Round]], size: int) -> int:
    """How many switches take part in a schedule, laid out on hosts or not."""
    given = schedule.keywords if isinstance(schedule, partial) else {}
    drawn = schedule.func if isinstance(schedule, partial) else schedule
    return drawn.switches(size, **given) if isinstance(drawn, Collective) else 0
