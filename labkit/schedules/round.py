"""A round: the messages that ranks exchange at the same time, stored as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from labkit.common.html import card, line, table

MANY = 64  # The HTML display of a round shows at most `MANY` messages.
Integers: TypeAlias = NDArray[np.int64]
Booleans: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, init=False, repr=False, slots=True)
class Round:
    """The messages of one communication round, each with a range of chunks.

    A round of messages has the following rules:

    - Every message carries the values that its source held before the round.
    - If `reduce` is false, the value in the message replaces the receiver's value. If `reduce` is
      false, no other message of the round may change the same chunk of the receiver.
    - If `reduce` is true, the receiver adds all contributions to a chunk **in rank order**. The
      receiver's own value is one of the contributions: v = ((v₀ + v₁) + v₂) + … . The result of
      floating-point addition depends on the order. The fixed order gives the same bits on all ranks
      that add the same contributions.

    Chunks are the equal parts into which a schedule divides the buffer (see `boundaries`). Each
    source submits its messages to its link in the order of the rows.

    Args:
        source, destination: Sending and receiving rank of each message.
        chunk, span, reduce: First chunk of each message, its number of chunks, and whether the
            receiver adds them. Each field is a column of the same length, or one value for all
            rows.
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
        """Return (source, destination, chunk, span, reduce) of each message."""
        columns = (self.source, self.destination, self.chunk, self.span, self.reduce)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def take(self, index: Integers | Booleans) -> Round:
        """Return the rows that an index or a mask selects, in the order of the index."""
        columns = (self.source, self.destination, self.chunk, self.span)
        return Round(*(column[index] for column in columns), reduce=self.reduce[index])

    def sent_by(self, rank: int) -> Round:
        """Return the messages that the rank `rank` sends, in the order of submission."""
        return self.take(self.source == rank)

    def received_by(self, rank: int) -> Round:
        """Return the messages that the rank `rank` receives, sorted by source."""
        # A receiver adds contributions in the order of the ranks that send them.
        index = np.flatnonzero(self.destination == rank)
        return self.take(index[np.argsort(self.source[index], kind="stable")])

    def __repr__(self) -> str:
        return f"<Round of {len(self)} messages>"

    def _repr_html_(self) -> str:
        rows = describe_messages(self)
        rest = len(self) - len(rows)
        return card(
            repr(self).strip("<>"),
            table(rows, ["message", "chunks", "receiver"]),
            line(f"and {rest} more") if rest else "",
        )

    def on(self, ranks: ArrayLike, parts: int = 1, first: ArrayLike = 0) -> Round:
        """Return the same messages between other ranks; divide each chunk into `parts` chunks.

        Args:
            ranks: The new ranks: rank 0 becomes ranks[0], and so on. The array of ranks may also
                have the shape (copies, ranks). Each row of the array then defines the ranks of one
                copy of the messages.
            parts: Number of new chunks for each chunk.
            first: New number of chunk 0, either one number for all copies or one number per copy.
        """
        names = np.asarray(ranks, np.int64)
        source, destination = names[..., self.source], names[..., self.destination]
        chunk = np.asarray(first)[..., None] + self.chunk * parts
        columns = (source, destination, chunk, self.span * parts, self.reduce)
        if names.ndim == 1 and chunk.ndim == 1:
            return Round(*columns[:4], reduce=self.reduce)
        flat = [np.broadcast_to(column, source.shape).ravel() for column in columns]
        return Round(*flat[:4], reduce=flat[4])


def describe_messages(step: Round) -> list[list[str]]:
    """Return a text (ranks, chunks, action of the receiver) for each displayed message."""
    return [
        [
            f"{source} → {destination}",
            f"{chunk}" if span == 1 else f"{chunk} to {chunk + span - 1}",
            "adds" if reduce else "replaces",
        ]
        for source, destination, chunk, span, reduce in step.rows()[:MANY]
    ]


Schedule: TypeAlias = Callable[[int], Iterable[Round]]


def _column(values: ArrayLike, length: int, dtype: type[np.generic]) -> NDArray[np.generic]:
    # A schedule may give a scalar instead of a column of equal values.
    array = np.asarray(values, dtype)
    return np.full(length, array) if array.ndim == 0 else array


def join(rounds: Iterable[Round]) -> Round:
    """Return one round with the messages of several rounds."""
    columns = [(r.source, r.destination, r.chunk, r.span, r.reduce) for r in rounds]
    *messages, reduce = map(np.concatenate, zip(*columns, strict=True))
    return Round(*messages, reduce=reduce)


def run_concurrently(schedules: Iterable[Iterable[Round | None]]) -> Iterator[Round]:
    """Run schedules concurrently: merge their first rounds, then their second rounds, and so on.

    `None` stands for a round in which a schedule sends nothing.
    """
    for rounds in zip_longest(*schedules):
        yield join(step for step in rounds if step is not None)


def count_chunks(rounds: Iterable[Round]) -> int:
    """Return the number of chunks into which a schedule divides the buffer, at least 1."""
    return max((int((step.chunk + step.span).max()) for step in rounds if len(step)), default=1)


def boundaries(length: int, chunks: int) -> Integers:
    """Return an array b of nearly equal chunks; chunk c of the buffer is [b[c], b[c + 1]).

    boundaries(7, 3) = [0, 2, 4, 7]
    """
    # The product is computed before the integer division; otherwise the last chunk would get the
    # whole remainder.
    return np.arange(chunks + 1, dtype=np.int64) * length // chunks


def circle(size: int) -> tuple[Integers, Integers]:
    """Return all ordered pairs (source, destination), step by step.

    In step k = 1 … size - 1, rank r sends to rank r + k. Each rank receives from one rank per step.
    A full-duplex link therefore carries one message at a time in each direction.
    """
    ranks = np.arange(size, dtype=np.int64)
    step = np.arange(1, size, dtype=np.int64)[:, None]
    return np.tile(ranks, size - 1), ((ranks + step) % size).ravel()
