"""The reference interpreter: any schedule in plain NumPy, held against its promise."""

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
    """A schedule that does not do what it promises."""


def execute(rounds: Iterable[Round], buffers: Buffers) -> Iterator[tuple[Round, Buffers]]:
    """Carry out a schedule on the buffers of all ranks; yields the values after each round.

    The semantics are those of `Round`, bit for bit. `buffers` stays as it is.

    Args: buffers: shape (size, length), any dtype that adds.
    Raises: ScheduleError, where a chunk is replaced and something else arrives for it.
    """
    schedule = list(rounds)
    edges = boundaries(buffers.shape[1], count_chunks(schedule))
    for each in schedule:
        buffers = _after(each, buffers, edges)
        yield each, buffers


def result(rounds: Iterable[Round], buffers: Buffers) -> Buffers:
    """What the ranks hold at the end, shape (size, length)."""
    for _, values in execute(rounds, buffers):
        buffers = values
    return buffers


def _after(each: Round, before: Buffers, edges: Integers) -> Buffers:
    after = before.copy()
    contributors: dict[tuple[int, int], list[int]] = {}
    replaced: set[tuple[int, int]] = set()
    for source, destination, first, span, reduce in each.rows():
        for chunk in range(first, first + span):
            place = (destination, chunk)
            if place in replaced or (not reduce and place in contributors):
                raise ScheduleError(
                    f"rank {destination} replaces chunk {chunk} and receives it again in the "
                    f"same round: only contributions that are added may meet"
                )
            if reduce:
                contributors.setdefault(place, [destination]).append(source)
                continue
            replaced.add(place)
            part = slice(edges[chunk], edges[chunk + 1])
            after[destination, part] = before[source, part]
    for (rank, chunk), ranks in contributors.items():
        part = slice(edges[chunk], edges[chunk + 1])
        # In order of rank, as `Round` says: floats depend on it.
        first, *others = sorted(ranks)
        total = before[first, part]
        for other in others:
            total = total + before[other, part]
        after[rank, part] = total
    return after


def count(rounds: Iterable[Round], size: int) -> Counts:
    """Messages and chunks that each rank sends in a schedule."""
    schedule = list(rounds)
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for each in schedule:
        own = each.source < size  # switches are not counted
        np.add.at(messages, each.source[own], 1)
        np.add.at(volume, each.source[own], each.span[own])
    return Counts(messages, volume, count_chunks(schedule))


def check(collective: Collective[...], size: int, expected: Counts | None = None) -> Counts:
    """Hold a schedule against its promise; returns what it sends.

    1. Rows make sense: ranks and chunks exist, nobody sends to itself.
    2. Every rank ends with exactly what is promised (64-bit integers: exact sums).
    3. Ranks that end with a sum hold the same bits (float32).
    4. Messages and volume equal the textbook's, where given (`Collective.counts`).

    Raises: ScheduleError, naming the rank and the chunk.
    """
    schedule = list(collective.schedule(size))
    chunks, switches = count_chunks(schedule), collective.switches(size)
    for number, each in enumerate(schedule):
        _check_rows(each, size + switches, number)
    ends = collective.ends(size, chunks)
    _check_values(schedule, ends, switches)
    _check_bits(schedule, ends, switches)
    counted = count(schedule, size)
    if expected is not None and counted != expected:
        raise ScheduleError(f"{size} ranks send {counted}, the textbook says {expected}")
    return counted


def _check_rows(each: Round, size: int, number: int) -> None:
    for row in each.rows():
        source, destination, chunk, span, _ = row
        if source == destination:
            raise ScheduleError(f"round {number}: rank {source} sends to itself in {row}")
        if not (0 <= source < size and 0 <= destination < size and chunk >= 0 and span >= 1):
            raise ScheduleError(f"round {number}: {row} leaves {size} ranks or has no chunk")


def _check_values(schedule: list[Round], ends: Integers, switches: int) -> None:
    # Wide numbers: sums of other contributions are then never equal by chance.
    start = np.random.default_rng(0).integers(-(2**40), 2**40, ends.shape)
    total = start.sum(axis=0)
    owned = np.take_along_axis(start, np.maximum(ends, 0), axis=0)
    wanted = np.where(ends == SUM, total, owned)
    wrong = (_of_ranks(schedule, start, switches) != wanted) & (ends != ANY)
    # The first one is enough.
    for rank, chunk in np.argwhere(wrong):
        promise = "the sum" if ends[rank, chunk] == SUM else f"that of rank {ends[rank, chunk]}"
        raise ScheduleError(f"rank {rank} does not end with {promise} in chunk {chunk}")


def _of_ranks(schedule: list[Round], start: Buffers, switches: int) -> Buffers:
    """What ranks hold at the end; switches begin with zeros."""
    zeros = np.zeros((switches, start.shape[1]), start.dtype)
    return result(schedule, np.concatenate([start, zeros]))[: len(start)]


def _check_bits(schedule: list[Round], ends: Integers, switches: int, draws: int = 16) -> None:
    """Many draws a chunk: another order of additions often rounds to the same bits."""
    size, chunks = ends.shape
    start = np.random.default_rng(1).normal(size=(size, chunks * draws)).astype(np.float32)
    final = _of_ranks(schedule, start, switches).reshape(size, chunks, draws).view(np.uint32)
    for chunk in range(chunks):
        held = final[ends[:, chunk] == SUM, chunk]
        if len(held) and (held != held[0]).any():
            raise ScheduleError(f"ranks differ in the bits of the sum of chunk {chunk}")
