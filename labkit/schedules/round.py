"""A round: the messages that ranks exchange at the same time, as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from labkit.common.html import card, line, table

MANY = 64  # messages of a round that are shown
Integers: TypeAlias = NDArray[np.int64]
Booleans: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, init=False, repr=False, slots=True)
class Round:
    """Messages that leave together: row i carries chunks [chunk, chunk + span) of its source.

    Semantics, the same for every reader:

    - Every message carries the values from before the round.
    - `reduce` false: the value replaces the receiver's. Nothing else may arrive for that chunk.
    - `reduce` true: all contributions that a rank receives for a chunk in the round, **its own
      value included, are added in order of rank**: v = ((v₀ + v₁) + v₂) + … . Floating-point sums
      depend on their order; this one depends on no clock and on no receiver, so that ranks that
      add up the same contributions hold the same bits.

    Chunks are the equal parts into which a schedule divides the buffer (see `boundaries`). The
    order of rows is the order in which a source hands its messages to its link.

    Args: columns of equal length; `chunk`, `span` and `reduce` may be one value for all rows.
    """

    source: Integers
    destination: Integers
    chunk: Integers
    span: Integers
    reduce: Booleans

    def __init__(
        self,
        source: ArrayLike,
        destination: ArrayLike,
        chunk: ArrayLike = 0,
        span: ArrayLike = 1,
        *,
        reduce: ArrayLike,
    ) -> None:
        put = object.__setattr__
        put(self, "source", np.asarray(source, np.int64))
        put(self, "destination", np.asarray(destination, np.int64))
        put(self, "chunk", _column(chunk, len(self), np.int64))
        put(self, "span", _column(span, len(self), np.int64))
        put(self, "reduce", _column(reduce, len(self), np.bool_))

    def __len__(self) -> int:
        """Number of messages."""
        return len(self.source)

    def rows(self) -> list[tuple[int, int, int, int, bool]]:
        """(source, destination, chunk, span, reduce) of each message."""
        columns = (self.source, self.destination, self.chunk, self.span, self.reduce)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def take(self, index: Integers | Booleans) -> Round:
        """The rows that an index or a mask selects, in its order."""
        columns = (self.source, self.destination, self.chunk, self.span)
        return Round(*(column[index] for column in columns), reduce=self.reduce[index])

    def sent_by(self, rank: int) -> Round:
        """The messages that this rank sends, in the order of its link."""
        return self.take(self.source == rank)

    def received_by(self, rank: int) -> Round:
        """The messages that this rank receives, in order of their sources."""
        # By source, for contributions are added in order of rank.
        index = np.flatnonzero(self.destination == rank)
        return self.take(index[np.argsort(self.source[index], kind="stable")])

    def __repr__(self) -> str:
        return f"<Round of {len(self)} messages>"

    def _repr_html_(self) -> str:
        rows = messages_of(self)
        rest = len(self) - len(rows)
        return card(
            repr(self).strip("<>"),
            table(rows, ["message", "chunks", "receiver"]),
            line(f"and {rest} more") if rest else "",
        )

    def on(self, ranks: ArrayLike, parts: int = 1, first: ArrayLike = 0) -> Round:
        """The same messages among other ranks (0 becomes ranks[0], …), each chunk cut in parts.

        Args: ranks: or several lists of them, shape (copies, ranks): the messages in each; first:
        the chunk that takes the place of chunk 0, or one for each copy.
        """
        names = np.asarray(ranks, np.int64)
        source, destination = names[..., self.source], names[..., self.destination]
        chunk = np.asarray(first)[..., None] + self.chunk * parts
        columns = (source, destination, chunk, self.span * parts, self.reduce)
        if names.ndim == 1 and chunk.ndim == 1:
            return Round(*columns[:4], reduce=self.reduce)
        flat = [np.broadcast_to(column, source.shape).ravel() for column in columns]
        return Round(*flat[:4], reduce=flat[4])


def messages_of(each: Round) -> list[list[str]]:
    """Way, chunks, and what the receiver does with them, of the messages that are shown."""
    return [
        [
            f"{source} → {destination}",
            f"{chunk}" if span == 1 else f"{chunk} to {chunk + span - 1}",
            "adds" if reduce else "replaces",
        ]
        for source, destination, chunk, span, reduce in each.rows()[:MANY]
    ]


Schedule: TypeAlias = Callable[[int], Iterable[Round]]


def _column(values: ArrayLike, length: int, dtype: type[np.generic]) -> NDArray[np.generic]:
    # One value stands for all rows, so that schedules need not repeat it.
    array = np.asarray(values, dtype)
    return np.full(length, array) if array.ndim == 0 else array


def join(rounds: Iterable[Round]) -> Round:
    """One round with the messages of several."""
    columns = [(r.source, r.destination, r.chunk, r.span, r.reduce) for r in rounds]
    *messages, reduce = map(np.concatenate, zip(*columns, strict=True))
    return Round(*messages, reduce=reduce)


def beside(schedules: Iterable[Iterable[Round | None]]) -> Iterator[Round]:
    """Schedules that run at the same time: their first rounds join, then their second, …

    `None` is a round in which a schedule pauses.
    """
    # The longest: schedules that end earlier have no more messages to join.
    for rounds in zip_longest(*schedules):
        yield join(each for each in rounds if each is not None)


def count_chunks(rounds: Iterable[Round]) -> int:
    """Number of equal parts into which a schedule divides the buffer; 1 without messages."""
    return max((int((each.chunk + each.span).max()) for each in rounds if len(each)), default=1)


def boundaries(length: int, chunks: int) -> Integers:
    """Chunk c of a buffer is [b[c], b[c + 1]): sizes differ by one at most.

    boundaries(7, 3) = [0, 2, 4, 7]
    """
    # Multiplied first: divided first, all of the rest would go to the last chunk.
    return np.arange(chunks + 1, dtype=np.int64) * length // chunks


def circle(size: int) -> tuple[Integers, Integers]:
    """All ordered pairs (source, destination), step by step around the circle.

    In step k = 1 … size - 1 rank r sends to r + k: no two ranks of a step share a receiver, so a
    full-duplex link to a switch is never asked for two messages at a time.
    """
    ranks = np.arange(size, dtype=np.int64)
    step = np.arange(1, size, dtype=np.int64)[:, None]
    return np.tile(ranks, size - 1), ((ranks + step) % size).ravel()
