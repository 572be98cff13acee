"""The reference interpreter, which executes any schedule in NumPy and verifies its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import LabkitError
from labkit.schedules.collective import ANY, SUM, Collective
from labkit.schedules.formulas import Counts
from labkit.schedules.round import Integers, Round, boundaries, count_chunks

Buffers = NDArray[Any]  # (size, length): row r is the buffer of rank r


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
        from_rank = step.source < size  # messages that switches send are not counted
        np.add.at(messages, step.source[from_rank], 1)
        np.add.at(volume, step.source[from_rank], step.span[from_rank])
    return Counts(messages, volume, count_chunks(schedule))


def verify_schedule(
    collective: Collective[...], size: int, expected: Counts | None = None
) -> Counts:
    """Verify the result that a schedule promises; return the messages and chunks each rank sends.

    1. All ranks and chunks in messages exist, and no rank sends to itself. 2. Every rank ends with
    exactly the promised values (tested with 64-bit integers, whose sums are exact). 3. All ranks
    that end with the same sum hold the same bits (tested with float32). 4. The numbers of messages
    and chunks equal the textbook's (`Collective.counts`), if `expected` is given.

    Raises:
        ScheduleError: If the schedule violates one of these four conditions; the message names the
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
    # With large random numbers, two different sums are never equal by chance.
    start = np.random.default_rng(0).integers(-(2**40), 2**40, ends.shape)
    total = start.sum(axis=0)
    owned = np.take_along_axis(start, np.maximum(ends, 0), axis=0)
    expected = np.where(ends == SUM, total, owned)
    wrong = (_final_values(schedule, start, switches) != expected) & (ends != ANY)
    # The first wrong chunk raises an error, which ends the loop.
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
    """Compare the bits of many random sums, because one sum may agree by chance in two orders."""
    size, chunks = ends.shape
    start = np.random.default_rng(1).normal(size=(size, chunks * draws)).astype(np.float32)
    final = _final_values(schedule, start, switches).reshape(size, chunks, draws).view(np.uint32)
    for chunk in range(chunks):
        sums = final[ends[:, chunk] == SUM, chunk]
        if len(sums) and (sums != sums[0]).any():
            raise ScheduleError(f"ranks differ in the bits of the sum of chunk {chunk}")
