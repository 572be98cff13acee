"""A collective: a schedule, its postcondition, and its textbook costs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import WRAPPER_ASSIGNMENTS, partial
from typing import Generic, Literal, NoReturn, ParamSpec, Protocol, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.common.html import card, table
from labkit.schedules.round import Integers, Round, describe_messages


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers of messages and of chunks that each rank sends in a schedule.

    Args:
        messages: Number of messages that each rank sends, shape (size,).
        volume: Number of chunks that each rank sends, shape (size,).
        chunks: Number of equal parts of the buffer; one part is the unit of `volume`.
    """

    messages: Integers
    volume: Integers
    chunks: int

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Counts)
            and np.array_equal(self.messages, other.messages)
            and np.array_equal(self.volume, other.volume)
            and self.chunks == other.chunks
        )

    def bytes(self, nbytes: float) -> NDArray[np.float64]:
        """Return the bytes that each rank sends for a buffer of `nbytes`, shape (size,)."""
        return np.multiply(self.volume, nbytes / self.chunks, dtype=np.float64)


class LinkParameters(Protocol):
    """The parameters of a uniform network: one latency (s) and one bandwidth (bytes/s)."""

    @property
    def latency(self) -> float: ...

    @property
    def bandwidth(self) -> float: ...


@dataclass(frozen=True)
class AlphaBetaCost:
    """The time in s for n bytes: a·α (latency) + b·nβ (transfer) + c·nγ (addition)."""

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0

    def seconds(self, nbytes: float, network: LinkParameters, gamma: float = 0.0) -> float:
        """Return the time in s for a buffer of `nbytes` on one switch; `gamma` is in s/byte."""
        per_byte = self.beta / network.bandwidth + self.gamma * gamma
        return self.alpha * network.latency + per_byte * nbytes

    def crossover(
        self, other: AlphaBetaCost, network: LinkParameters, gamma: float = 0.0
    ) -> float | None:
        """Return the buffer size in bytes at which `self` and `other` cost the same, or None."""
        fixed = (self.alpha - other.alpha) * network.latency
        growth = (other.beta - self.beta) / network.bandwidth + (other.gamma - self.gamma) * gamma
        # No positive buffer size has equal costs. The cost lines are parallel, or cross at a size
        # of 0 or less.
        if growth == 0 or fixed / growth <= 0:
            return None
        return fixed / growth

    def __add__(self, other: AlphaBetaCost) -> AlphaBetaCost:
        return AlphaBetaCost(
            self.alpha + other.alpha, self.beta + other.beta, self.gamma + other.gamma
        )


def floor_lg(size: int) -> int:
    """⌊lg p⌋."""
    return size.bit_length() - 1


def ceil_lg(size: int) -> int:
    """⌈lg p⌉."""
    return (size - 1).bit_length()


def uniform_counts(size: int, messages: int, chunks: int) -> Counts:
    """Return the counts if every rank sends `messages` messages of one chunk each."""
    same = np.full(size, messages)
    return Counts(same, same, chunks)


def rooted_counts(size: int, root: int, chunks: int = 1) -> Counts:
    """Return message counts for a collective with rank 0 as root."""
    sent = np.where(np.arange(size) == 0, root, 1)
    return Counts(sent, sent, chunks)


def chunked_counts(size: int) -> Counts:
    """Return the counts of an allreduce with minimum volume: 2(p - 1) messages of n/p bytes."""
    return uniform_counts(size, 2 * (size - 1), size)


def chunked_cost(size: int) -> AlphaBetaCost:
    """Return the cost 2(p - 1)α + (p - 1)/p n(2β + γ) of messages sent one by one."""
    steps = size - 1
    return AlphaBetaCost(2 * steps, 2 * steps / size, steps / size)


def two_round_costs(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the cost if ranks send each round's messages at once, with latency 2α in total."""
    cost = chunked_cost(size)
    return (AlphaBetaCost(2 * (size > 1), cost.beta, cost.gamma),)


SUM = -1  # The chunk finally contains the sum of all ranks' values.
ANY = -2  # The value ANY means that a collective makes no promise about a chunk's final content.
SHOWN = 4  # The HTML display of a collective shows four ranks.

Call = ParamSpec("Call")
Ends: TypeAlias = Callable[[int, int], Integers]


class DrawnFunction:
    """A function with a drawing in its docstring, and with more properties as fields.

    The object copies the name and the docstring of the function.
    """

    def take_name(self, drawing: Callable[..., object]) -> None:
        """Copy the name and the docstring of the function to this object."""
        for name in WRAPPER_ASSIGNMENTS:
            if hasattr(drawing, name):  # A `functools.partial` object has no attribute `__name__`.
                object.__setattr__(self, name, getattr(drawing, name))
        # The function `inspect.signature` reads `__wrapped__`, which needs `object.__setattr__`,
        # because the dataclass is frozen.
        object.__setattr__(self, "__wrapped__", drawing)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        # Pickle can store the decorated function by name, because that name refers to the
        # `DrawnFunction` object.
        name = getattr(self, "__name__", "")
        if getattr(sys.modules.get(self.__module__), name, None) is self:
            return str(name)
        return super().__reduce_ex__(protocol)

    @property
    def paper(self) -> str:
        """The source that the docstring cites."""
        return re.sub(r"\s+", " ", self.__doc__ or "").partition("ource: ")[2].strip()


def _unknown(*_: object) -> NoReturn:
    raise InvalidInput("this schedule has no formula; give it one, or simulate the schedule")


@dataclass(frozen=True, eq=False, repr=False)
class Collective(DrawnFunction, Generic[Call]):
    """A callable schedule that returns its rounds, with its postcondition and its textbook costs.

    Args:
        schedule: Function from the number of ranks to the rounds.
        ends: Function that returns the final content of each chunk on each rank. The function takes
            (size, chunks), and its table has the shape (size, chunks). An entry of the table is
            `SUM`, `ANY`, or a rank r ≥ 0. Rank r means that the final content is rank r's initial
            chunk.
        counts: Function from the number p of ranks to textbook counts. The counts are the messages
            and chunks that each rank sends.
        cost: Function from the number p of ranks to the time according to the textbook.
        critical_paths: Function from the number p of ranks to costs. The costs belong to all
            possible critical paths on one switch. The slowest path determines the time. Default:
            the textbook cost as the only path.
        layout: Name of the schedule's argument that describes the network: "hosts", "links" or
            None.
        gathers: Rounds of the final allgather, or None without a final allgather. In the allgather,
            each rank distributes its part of the sum.
        between: Rounds of messages between hosts, in schedules that begin and end with steps inside
            each host. The buffer is divided into as many parts as the smallest host has ranks.
            Before the rounds in `between`, the ranks of each host add up their buffers. The i-th
            rank of a host adds up part i of the buffers. After the rounds in `between`, each rank
            copies its part of the sum. The copies go to the other ranks on the same host.
        switches: Number of participating network switches, whose numbers follow the numbers of the
            ranks.
    """

    schedule: Callable[Call, Iterable[Round]]
    ends: Ends
    counts: Callable[..., Counts] = _unknown
    cost: Callable[[int], AlphaBetaCost] = _unknown
    critical_paths: Callable[[int], tuple[AlphaBetaCost, ...]] = _unknown
    layout: Literal["hosts", "links"] | None = None
    gathers: Callable[[int], Iterable[Round]] | None = None
    between: Callable[..., Iterable[Round]] | None = None
    switches: Callable[..., int] = lambda size, **_: 0

    def __post_init__(self) -> None:
        self.take_name(self.schedule)
        if self.critical_paths is _unknown:
            object.__setattr__(self, "critical_paths", lambda size: (self.cost(size),))

    def __call__(self, *args: Call.args, **kwargs: Call.kwargs) -> Iterable[Round]:
        """Return the rounds of the schedule."""
        return self.schedule(*args, **kwargs)

    def _repr_html_(self) -> str:
        drawing: Callable[..., Iterable[Round]] = self.schedule
        rounds = list(drawing(SHOWN))
        descriptions = [
            ", ".join(f"{way} {adds} {what}" for way, what, adds in describe_messages(step))
            for step in rounds
        ]
        rows = [[str(number), messages] for number, messages in enumerate(descriptions, 1)]
        count = sum(map(len, rounds))
        return card(
            f"Collective on {SHOWN} ranks: {len(rounds)} rounds, {count} messages",
            table(rows, ["round", "messages"]),
        )


def all_ranks_hold(value: int) -> Ends:
    """Return the postcondition that every rank holds `value` in every chunk."""
    return lambda size, chunks: np.full((size, chunks), value)


def root_holds(expected: Callable[[int], Integers | int]) -> Ends:
    """Return the postcondition that only rank 0 must hold the result."""

    def ends(size: int, chunks: int) -> Integers:
        table = np.full((size, chunks), ANY)
        table[0] = expected(chunks)
        return table

    return ends


def owners_hold(value: int) -> Ends:
    """Return the postcondition that rank r holds `value` in chunk r; others are unspecified."""
    return lambda size, chunks: np.where(np.eye(size, chunks, dtype=np.bool_), value, ANY)


def collective(
    ends: Ends,
    counts: Callable[..., Counts],
    cost: Callable[[int], AlphaBetaCost] = _unknown,
    critical_paths: Callable[[int], tuple[AlphaBetaCost, ...]] = _unknown,
    layout: Literal["hosts", "links"] | None = None,
    gathers: Callable[[int], Iterable[Round]] | None = None,
    between: Callable[..., Iterable[Round]] | None = None,
    switches: Callable[..., int] = lambda size, **_: 0,
) -> Callable[[Callable[Call, Iterable[Round]]], Collective[Call]]:
    """Return a decorator that turns a schedule into a `Collective` with the given properties."""
    known = (ends, counts, cost, critical_paths, layout, gathers, between, switches)
    return lambda drawing: Collective(drawing, *known)


def allreduce(schedule: Callable[Call, Iterable[Round]]) -> Collective[Call]:
    """Wrap a schedule as an allreduce of unknown cost, but return a `Collective` unchanged."""
    return (
        schedule if isinstance(schedule, Collective) else Collective(schedule, all_ranks_hold(SUM))
    )


def count_switches(schedule: Callable[..., Iterable[Round]], size: int) -> int:
    """Return the number of network switches that a schedule uses, with or without a host layout."""
    arguments = schedule.keywords if isinstance(schedule, partial) else {}
    function = schedule.func if isinstance(schedule, partial) else schedule
    return function.switches(size, **arguments) if isinstance(function, Collective) else 0
