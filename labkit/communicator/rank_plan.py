"""A rank's part of a schedule, compiled for buffers of one length: what to send, receive, add."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.schedules import Round, boundaries, count_chunks


@dataclass(frozen=True, slots=True)
class Message:
    """Elements [first, last) to or from a peer; `place`: where in the scratch it is received.

    A message that replaces and whose elements the rank does not send in the same round is
    received where it belongs: its place is -1.
    """

    peer: int
    first: int
    last: int
    place: int = -1


@dataclass(frozen=True, slots=True)
class Sum:
    """Elements [first, last) of the buffer become the sum of these, in this order.

    `terms` are places in the scratch; -1 stands for the rank's own value.
    """

    first: int
    last: int
    terms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One round of one rank, by its number from 1: send, receive, then add and copy."""

    number: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    sums: tuple[Sum, ...]
    copies: tuple[Message, ...]


@dataclass(frozen=True)
class Plan:
    """All rounds of one rank for one schedule and length.

    Attributes:
        steps: rounds in which the rank has something to do.
        scratch: elements that must be kept beside the buffer.
    """

    steps: tuple[Step, ...]
    scratch: int


def plan(schedule: Iterable[Round], rank: int, length: int) -> Plan:
    """Compile a schedule for a rank; empty messages (short buffers) are left out."""
    rounds = list(schedule)
    edges = boundaries(length, count_chunks(rounds)).tolist()
    steps = [_step(number, each, rank, edges) for number, each in enumerate(rounds, 1)]
    busy = tuple(step for step in steps if step.sends or step.receives)
    scratch = max((_scratch(step) for step in busy), default=0)
    return Plan(busy, scratch)


def _step(number: int, each: Round, rank: int, edges: list[int]) -> Step:
    sends = tuple(
        Message(destination, edges[chunk], edges[chunk + span])
        for _, destination, chunk, span, _ in each.sent_by(rank).rows()
        if edges[chunk + span] > edges[chunk]
    )
    receives, copies, place = [], [], 0
    contributions: dict[int, list[tuple[int, int]]] = {}  # chunk -> (rank, place in the scratch)
    for source, _, chunk, span, reduce in each.received_by(rank).rows():
        first, last = edges[chunk], edges[chunk + span]
        if first == last:
            continue
        kept = reduce or any(send.first < last and first < send.last for send in sends)
        message = Message(source, first, last, place if kept else -1)
        receives.append(message)
        if reduce:
            for part in range(chunk, chunk + span):
                found = contributions.setdefault(part, [(rank, -1)])
                found.append((source, place + edges[part] - first))
        elif kept:
            copies.append(message)
        place += last - first if kept else 0
    return Step(number, sends, tuple(receives), _sums(contributions, edges), tuple(copies))


def _sums(contributions: dict[int, list[tuple[int, int]]], edges: list[int]) -> tuple[Sum, ...]:
    """Sums of neighbouring chunks with the same contributors become one."""
    sums: list[Sum] = []
    for chunk in sorted(contributions):
        first, last = edges[chunk], edges[chunk + 1]
        terms = tuple(place for _, place in sorted(contributions[chunk]))
        if sums and sums[-1].last == first and _follows(sums[-1], terms):
            sums[-1] = Sum(sums[-1].first, last, sums[-1].terms)
        else:
            sums.append(Sum(first, last, terms))
    return tuple(each for each in sums if each.last > each.first)


def _follows(before: Sum, terms: tuple[int, ...]) -> bool:
    """Whether each term lies right behind the same term of the sum before."""
    length = before.last - before.first
    if len(before.terms) != len(terms):
        return False
    return all(
        (one == -1 and other == -1) or (one >= 0 and one + length == other)
        for one, other in zip(before.terms, terms, strict=True)
    )


def _scratch(step: Step) -> int:
    return sum(message.last - message.first for message in step.receives if message.place >= 0)
