"""The reference interpreter, which executes any schedule in NumPy and verifies its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import LabkitError
from labkit.schedules.collective import ANY, SUM, Collective, Counts, count_switches
from labkit.schedules.round import Integers, Round, Schedule, boundaries, count_chunks

Buffers = NDArray[Any]  # `Buffers` has the shape (ranks, length); row r is the buffer of rank r.


class ScheduleError(LabkitError):
    """Raised if a schedule is malformed or violates its postcondition."""


def execute(rounds: Iterable[Round], buffers: Buffers) -> Iterator[tuple[Round, Buffers]]:
    """Execute a schedule on the buffers of all ranks; yield each round and the buffers after it.

    The interpreter follows the rules in `Round`, so results are reproducible bit for bit. `buffers`
    is not modified.

    Args:
        rounds: The schedule.
        buffers: Array of shape (size, length), of any dtype with addition.

    Raises:
        ScheduleError: If one message replaces a chunk that another message of the same round also
            changes.
    """
    schedule = list(rounds)
    edges = boundaries(buffers.shape[1], count_chunks(schedule))
    for step in schedule:
        buffers = _after(step, buffers, edges)
        yield step, buffers


def final_buffers(rounds: Iterable[Round], buffers: Buffers) -> Buffers:
    """Return the buffers of all ranks after the last round, shape (size, length)."""
    for _, values in execute(rounds, buffers):
        buffers = values
    return buffers


def _after(step: Round, before: Buffers, edges: Integers) -> Buffers:
    after = before.copy()
    contributors: dict[tuple[int, int], list[int]] = {}
    replaced: set[tuple[int, int]] = set()
    for source, destination, first, span, reduce in step.rows():
        for chunk in range(first, first + span):
            place = (destination, chunk)
            if place in replaced or (not reduce and place in contributors):
                raise ScheduleError(
                    f"rank {destination} replaces chunk {chunk} and receives it again in the "
                    f"same round, but only messages that add may share a destination chunk"
                )
            if reduce:
                contributors.setdefault(place, [destination]).append(source)
                continue
            replaced.add(place)
            part = slice(edges[chunk], edges[chunk + 1])
            after[destination, part] = before[source, part]
    for (rank, chunk), ranks in contributors.items():
        part = slice(edges[chunk], edges[chunk + 1])
        # Contributions are added in rank order, because the result of floating-point addition
        # depends on the order.
        first, *others = sorted(ranks)
        total = before[first, part]
        for other in others:
            total = total + before[other, part]
        after[rank, part] = total
    return after


def count_messages(rounds: Iterable[Round], size: int) -> Counts:
    """Return the numbers of messages and chunks that each rank sends in a schedule."""
    schedule = list(rounds)
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for step in schedule:
        from_rank = step.source < size  # The counts exclude messages that network switches send.
        np.add.at(messages, step.source[from_rank], 1)
        np.add.at(volume, step.source[from_rank], step.span[from_rank])
    return Counts(messages, volume, count_chunks(schedule))


def verify_schedule(
    collective: Collective[...], size: int, expected: Counts | None = None
) -> Counts:
    """Verify the result that a schedule promises; return each rank's sent messages and chunks.

    1. All ranks and chunks in messages exist, and no rank sends to itself. 2. Every rank ends with
    exactly the promised values (tested with 64-bit integers, whose sums are exact). 3. All ranks
    that end with the same sum hold the same bits (tested with float32). 4. If `expected` is given,
    each rank sends the numbers of messages and chunks in `expected`.

    Raises:
        ScheduleError: If the schedule violates one of the four conditions; the message names the
            rank and the chunk.
    """
    schedule = list(collective.schedule(size))
    chunks, switches = count_chunks(schedule), collective.switches(size)
    for number, step in enumerate(schedule):
        _verify_rows(step, size + switches, number)
    ends = collective.ends(size, chunks)
    _verify_values(schedule, ends, switches)
    _verify_bits(schedule, ends, switches)
    counted = count_messages(schedule, size)
    if expected is not None and counted != expected:
        raise ScheduleError(
            f"{size} ranks send {counted}, but the textbook formula gives {expected}"
        )
    return counted


def _verify_rows(step: Round, size: int, number: int) -> None:
    for row in step.rows():
        source, destination, chunk, span, _ = row
        if source == destination:
            raise ScheduleError(f"round {number}: rank {source} sends to itself in {row}")
        if not (0 <= source < size and 0 <= destination < size and chunk >= 0 and span >= 1):
            raise ScheduleError(
                f"round {number}: {row} names no chunk, or a rank that is not below {size}"
            )


def _verify_values(schedule: list[Round], ends: Integers, switches: int) -> None:
    # Large random numbers make it very unlikely that a wrong sum equals the right sum by chance.
    start = np.random.default_rng(0).integers(-(2**40), 2**40, ends.shape)
    total = start.sum(axis=0)
    owned = np.take_along_axis(start, np.maximum(ends, 0), axis=0)
    expected = np.where(ends == SUM, total, owned)
    wrong = (_final_values(schedule, start, switches) != expected) & (ends != ANY)
    for rank, chunk in np.argwhere(wrong):
        promise = (
            "the sum" if ends[rank, chunk] == SUM else f"the chunk of rank {ends[rank, chunk]}"
        )
        raise ScheduleError(f"the final chunk {chunk} of rank {rank} is not {promise}")


def _final_values(schedule: list[Round], start: Buffers, switches: int) -> Buffers:
    """Return the final buffers of the ranks; switches start with buffers of zeros."""
    zeros = np.zeros((switches, start.shape[1]), start.dtype)
    return final_buffers(schedule, np.concatenate([start, zeros]))[: len(start)]


def _verify_bits(schedule: list[Round], ends: Integers, switches: int, draws: int = 16) -> None:
    """Verify that equal sums have equal bits; use many values, because one may match by chance."""
    size, chunks = ends.shape
    start = np.random.default_rng(1).normal(size=(size, chunks * draws)).astype(np.float32)
    final = _final_values(schedule, start, switches).reshape(size, chunks, draws).view(np.uint32)
    for chunk in range(chunks):
        sums = final[ends[:, chunk] == SUM, chunk]
        if len(sums) and (sums != sums[0]).any():
            raise ScheduleError(f"ranks differ in the bits of the sum of chunk {chunk}")


@dataclass(frozen=True, eq=False)
class Holdings:
    """A schedule and the content of all buffers after each of its rounds.

    Args:
        rounds: The rounds of the schedule.
        held: Array of counts, shape (rounds + 1, nodes, chunks, size). Entry [k, r, c, j] describes
            chunk c of rank r after k rounds. Each entry counts the contributions of one rank to one
            chunk. If the schedule uses network switches, their numbers follow the numbers of the
            ranks.
    """

    rounds: list[Round]
    held: Integers

    @property
    def chunks(self) -> int:
        """Number of chunks into which the buffer is divided."""
        return int(self.held.shape[2])

    @property
    def names(self) -> list[str]:
        """The names of ranks and then of switches: `rank 0`, `rank 1`, `switch 0`."""
        _, nodes, _, size = self.held.shape
        return [f"rank {n}" if n < size else f"switch {n - size}" for n in range(nodes)]

    @property
    def labels(self) -> list[str]:
        """The short names of ranks and switches: `0`, `1`, `S0`."""
        return [name.removeprefix("rank ").replace("switch ", "S") for name in self.names]

    @property
    def messages(self) -> int:
        """Number of messages in all rounds."""
        return sum(map(len, self.rounds))

    @property
    def complete(self) -> bool:
        """Whether every rank ends with the sum, in which each rank's value occurs exactly once."""
        return bool((self.held[-1, : self.held.shape[3]] == 1).all())

    def new(self, after: int) -> Integers:
        """Return an array of shape (nodes, chunks, size), 1 where round `after` added a value."""
        before = self.held[max(after - 1, 0)]
        arrivals: Integers = (self.held[after] > before).astype(np.int64)
        return arrivals


def follow(schedule: Schedule, size: int) -> Holdings:
    """Run a schedule on unit vectors instead of numbers: rank j starts with the unit vector e_j.

    Entry j of a chunk's sum then counts how often the value of rank j was added.
    """
    rounds = list(schedule(size))
    chunks = count_chunks(rounds)
    nodes = size + count_switches(schedule, size)
    # The array `start` has the shape (nodes, chunks · size).
    start = np.tile(np.eye(nodes, size, dtype=np.int64), chunks)
    states = [start, *(values for _, values in execute(rounds, start))]
    return Holdings(rounds, np.stack(states).reshape(-1, nodes, chunks, size))


def chunk_name(chunk: int) -> str:
    """Return the name of a chunk: a, b, …, z, then a1., b1., …"""
    turn, letter = divmod(chunk, 26)
    return chr(ord("a") + letter) + (f"{turn}." if turn else "")


def span_name(chunk: int, span: int) -> str:
    """Return the name of the chunks in a message, such as `b` or `a–c`."""
    first = chunk_name(chunk)
    return first if span == 1 else f"{first}–{chunk_name(chunk + span - 1)}"


def sum_name(terms: Integers, chunk: int, room: int = 80) -> str:
    """Return a sum as text: `a0+a1`, `a0–3+6`, `5/8` of the ranks, or `Σa` if it is complete.

    Args:
        terms: How often each rank's value is in the chunk, shape (size,).
        chunk: Number of the chunk.
        room: Maximum number of characters.
    """
    name = chunk_name(chunk)
    if (terms == 1).all():
        return f"Σ{name}"
    ranks = np.flatnonzero(terms).tolist()
    summands = [f"{'' if terms[rank] == 1 else terms[rank]}{name}{rank}" for rank in ranks]
    long = "+".join(summands)
    if len(long) <= room:
        return long
    # If a schedule is correct, no rank's value occurs twice in a sum.
    if terms.max() > 1:
        return f"{terms.sum()} values"
    short = name + "+".join(_range(run) for run in _runs(ranks))
    return short if len(short) <= room else f"{len(ranks)}/{len(terms)}"


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Split sorted ranks into runs of consecutive numbers: [0, 1, 2, 5] -> [[0, 1, 2], [5]]."""
    runs = [[ranks[0]]]
    for before, rank in pairwise(ranks):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _range(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}"


def message_size(step: Round, chunks: int) -> str:
    """Return a round's message sizes, such as `n/4 to n`, for a buffer of n bytes."""
    shares = sorted({Fraction(span, chunks) for span in step.span.tolist()})
    return " to ".join(dict.fromkeys(_part(share) for share in (shares[0], shares[-1])))


def _part(share: Fraction) -> str:
    numerator = "n" if share.numerator == 1 else f"{share.numerator}n"
    return numerator if share.denominator == 1 else f"{numerator}/{share.denominator}"
