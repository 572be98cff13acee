"""The executor, which runs this rank's plan of a schedule on real buffers over MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.wire import MpiWire, Seal
from labkit.schedules import Round, boundaries, count_chunks


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """A message that contains the buffer's elements [first, last), to or from another rank.

    Attributes:
        peer: The rank that receives or sends the message.
        first, last: The index of the message's first element, and the index after its last element.
        offset: The element of the scratch buffer at which the received message starts. The offset
            -1 means that the message goes directly into the rank's buffer. A received message can
            directly replace elements of the rank's buffer. The rank must not send the replaced
            elements in the same round.
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
        terms: The scratch-buffer offset of each term, in elements and in order of addition. The
            offset -1 means that the term is in the rank's own buffer.
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
    """Compile the plan of one rank from a schedule, without messages that contain no elements.

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
    # `contributions` maps each chunk to a list of pairs (rank, offset in the scratch buffer).
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
    """Return the sums of all chunks; neighbouring chunks with adjacent terms share one sum."""
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
    """Return whether the memory of each term follows that of the same term in `previous`."""
    length = previous.last - previous.first
    if len(previous.terms) != len(terms):
        return False
    return all(
        (last == -1 and current == -1) or (last >= 0 and last + length == current)
        for last, current in zip(previous.terms, terms, strict=True)
    )


def _scratch(step: PlannedRound) -> int:
    return sum(message.last - message.first for message in step.receives if message.offset >= 0)


class Executor:
    """An executor of this rank's plans; a plan is a compiled schedule.

    Args:
        wire: The transport that sends and receives messages.
        count_to: A function of (rank, bytes) that counts a message to a rank in the traffic meter.
        wait: A function that waits for the MPI requests of a round. The function `wait` raises an
            error after a timeout.
        sleep_until: A function that sleeps until a given time of the clock.
        emulation: The emulated network; None: the real network.

    Attributes:
        watch: A callback that receives (round number, buffer) after each round of this rank; None:
            no callback.
    """

    def __init__(
        self,
        wire: MpiWire,
        count_to: Callable[[int, int], None],
        wait: Callable[[list[Any], int], None],
        sleep_until: Callable[[float], None],
        emulation: Emulation | None,
    ) -> None:
        self._wire, self._comm = wire, wire.comm
        self._count_to, self._emulation = count_to, emulation
        self._wait, self._sleep_until = wait, sleep_until
        self._scratch = np.zeros(0, np.uint8)
        self.watch: Callable[[int, np.ndarray], None] | None = None

    def run(self, plan: RankPlan, buffer: np.ndarray, tag: int) -> None:
        """Run a plan on a flat, contiguous buffer, which the plan changes in place."""
        needed = plan.scratch * buffer.itemsize
        if self._scratch.nbytes < needed:
            self._scratch = np.zeros(needed, np.uint8)
        scratch = self._scratch[:needed].view(buffer.dtype)
        for step in plan.steps:
            self._exchange(step, buffer, scratch, tag)
            for copy in step.copies:
                buffer[copy.first : copy.last] = _receive_buffer(copy, buffer, scratch)
            for total in step.sums:
                _add(total.first, total.last, total.terms, buffer, scratch)
            if self.watch is not None:
                self.watch(step.number, buffer)

    def _exchange(
        self, step: PlannedRound, buffer: np.ndarray, scratch: np.ndarray, tag: int
    ) -> None:
        """Send and receive all messages of a round; return after all of them are delivered."""
        requests: list[Any] = []
        headers: list[np.ndarray] = []
        seals: list[Seal] = []
        for message in step.receives:
            if self._emulation:
                headers.append(np.zeros(1))
                requests.append(self._comm.Irecv(headers[-1], message.peer, tag))
            target = _receive_buffer(message, buffer, scratch).view(np.uint8)
            requests += self._wire.expect(target, message.peer, tag, seals)
        turn = self._emulation.turn() if self._emulation and step.sends else 0
        for message in step.sends:
            data = buffer[message.first : message.last].view(np.uint8)
            if self._emulation:
                ticket = self._emulation.depart(message.peer, data.nbytes, turn)
                for moment in self._emulation.send_moments(ticket):
                    self._sleep_until(moment)
                requests.append(self._comm.Isend(np.array([ticket]), message.peer, tag))
            requests += self._wire.post(data, message.peer, tag, step.number)
            self._count_to(message.peer, data.nbytes)
        self._wait(requests, step.number)
        self._wire.verify(seals, step.number)
        if self._emulation and step.receives:
            arrivals = [
                (float(header[0]), message.peer, (message.last - message.first) * buffer.itemsize)
                for header, message in zip(headers, step.receives, strict=True)
            ]
            for moment in self._emulation.deliveries(arrivals):
                self._sleep_until(moment)


def _receive_buffer(message: PlannedMessage, buffer: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    if message.offset < 0:
        return buffer[message.first : message.last]
    return scratch[message.offset : message.offset + message.last - message.first]


def _add(
    first: int, last: int, terms: tuple[int, ...], buffer: np.ndarray, scratch: np.ndarray
) -> None:
    """Add the terms in the given order, and write the sum into elements [first, last)."""
    local = buffer[first:last]
    parts = [local if offset < 0 else scratch[offset : offset + last - first] for offset in terms]
    # Two terms may be added in any order. The sum a + b has the same bits as b + a.
    if parts[0] is local or len(parts) == 2:
        others = parts[1:] if parts[0] is local else parts[:1]
        for part in others:
            np.add(local, part, out=local)
        return
    total = parts[0]
    for part in parts[1:]:
        np.add(total, part, out=total)
    local[...] = total
