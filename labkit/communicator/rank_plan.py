"""Plans: the sends, receives and sums of one rank in a schedule, for one buffer length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.schedules import Round, boundaries, count_chunks


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """A message that contains the buffer's elements [first, last), to or from another rank.

    Attributes:
        peer: The rank that receives or sends the message.
        first, last: The index of the message's first element, and the index after its last element.
        offset: The offset, in elements, at which the received message starts in the scratch buffer;
            the offset -1 means that the rank receives the message directly into its buffer. A rank
            can receive a message directly into its buffer if it does not send the replaced elements
            in the same round.
    """

    peer: int
    first: int
    last: int
    offset: int = -1


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum of received and local values that replaces the buffer's elements [first, last).

    Attributes:
        first, last: The index of the sum's first element, and the index after its last element.
        terms: The scratch-buffer offset of each term, in elements and in the order of addition; -1
            means that the term is in the rank's own buffer.
    """

    first: int
    last: int
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """One round of one rank: the rank first sends and receives, then copies and adds.

    Attributes:
        number: The number of the round in the schedule, from 1.
        sends: The messages that the rank sends.
        receives: The messages that the rank receives.
        sums: The sums that the rank computes from received and local values.
        copies: The received messages to copy from the scratch buffer into the buffer.
    """

    number: int
    sends: tuple[PlannedMessage, ...]
    receives: tuple[PlannedMessage, ...]
    sums: tuple[Sum, ...]
    copies: tuple[PlannedMessage, ...]


@dataclass(frozen=True)
class RankPlan:
    """All rounds of one rank for one schedule and buffer length.

    Attributes:
        steps: The rounds in which the rank sends or receives.
        scratch: The number of elements of the scratch buffer.
    """

    steps: tuple[PlannedRound, ...]
    scratch: int


def plan(schedule: Iterable[Round], rank: int, length: int) -> RankPlan:
    """Compile the plan of one rank from a schedule; omit messages that are empty in short buffers.

    Args:
        schedule: The rounds of all ranks.
        rank: The rank for which the schedule is compiled.
        length: The number of elements of the buffer.
    """
    rounds = list(schedule)
    edges = boundaries(length, count_chunks(rounds)).tolist()
    steps = [_step(number, one_round, rank, edges) for number, one_round in enumerate(rounds, 1)]
    busy = tuple(step for step in steps if step.sends or step.receives)
    scratch = max((_scratch(step) for step in busy), default=0)
    return RankPlan(busy, scratch)


def _step(number: int, one_round: Round, rank: int, edges: list[int]) -> PlannedRound:
    sends = tuple(
        PlannedMessage(destination, edges[chunk], edges[chunk + span])
        for _, destination, chunk, span, _ in one_round.sent_by(rank).rows()
        if edges[chunk + span] > edges[chunk]
    )
    receives, copies, offset = [], [], 0
    # This dictionary maps each chunk to its contributions: (rank, offset in the scratch buffer).
    contributions: dict[int, list[tuple[int, int]]] = {}
    for source, _, chunk, span, reduce in one_round.received_by(rank).rows():
        first, last = edges[chunk], edges[chunk + span]
        if first == last:
            continue
        in_scratch = reduce or any(send.first < last and first < send.last for send in sends)
        message = PlannedMessage(source, first, last, offset if in_scratch else -1)
        receives.append(message)
        if reduce:
            for part in range(chunk, chunk + span):
                terms = contributions.setdefault(part, [(rank, -1)])
                terms.append((source, offset + edges[part] - first))
        elif in_scratch:
            copies.append(message)
        offset += last - first if in_scratch else 0
    return PlannedRound(number, sends, tuple(receives), _sums(contributions, edges), tuple(copies))


def _sums(contributions: dict[int, list[tuple[int, int]]], edges: list[int]) -> tuple[Sum, ...]:
    """Return the sums of all chunks; join neighbouring chunks whose terms are adjacent."""
    sums: list[Sum] = []
    for chunk in sorted(contributions):
        first, last = edges[chunk], edges[chunk + 1]
        terms = tuple(offset for _, offset in sorted(contributions[chunk]))
        if sums and sums[-1].last == first and _follows(sums[-1], terms):
            sums[-1] = Sum(sums[-1].first, last, sums[-1].terms)
        else:
            sums.append(Sum(first, last, terms))
    return tuple(total for total in sums if total.last > total.first)


def _follows(previous: Sum, terms: tuple[int, ...]) -> bool:
    """Return whether each term directly follows, in memory, the same term of the previous sum."""
    length = previous.last - previous.first
    if len(previous.terms) != len(terms):
        return False
    return all(
        (last == -1 and current == -1) or (last >= 0 and last + length == current)
        for last, current in zip(previous.terms, terms, strict=True)
    )


def _scratch(step: PlannedRound) -> int:
    return sum(message.last - message.first for message in step.receives if message.offset >= 0)
