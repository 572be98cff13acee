"""Schedules over values whose size the receiver does not know: payloads, sparse sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import Rules, Seal, Wire
from labkit.schedules import Round

Value = TypeVar("Value")


class Kind(Protocol[Value]):
    """How values of one kind are added, and what they are as bytes."""

    def add(self, values: Sequence[Value]) -> Value:
        """The sum, in this order."""

    def to_bytes(self, values: Sequence[Value]) -> np.ndarray:
        """What a message that carries these values holds, uint8."""

    def from_bytes(self, data: np.ndarray, first: int, count: int) -> list[Value]:
        """The values in a message, of `count` chunks from `first` on."""


class Courier:
    """Carries out a schedule on this rank's chunks, one value a chunk.

    A header goes before each message, with its length; it belongs to the transport and is not
    metered, as with MPI's own.

    Args:
        patience: how this rank waits; its communicator carries the messages, its meter counts them.
        emulation: the network to emulate, or None.
        rules: what holds for all messages.
    """

    def __init__(
        self, patience: WaitPolicy, emulation: Emulation | None, rules: Rules | None = None
    ) -> None:
        self._wire = Wire(patience.comm, rules, patience)
        self._comm, self._rank, self._emulation = patience.comm, patience.rank, emulation
        self._patience, self._traffic, self._wait = patience, patience.traffic, patience.complete
        self._sleep_until = patience.sleep_until

    def run(self, rounds: Sequence[Round], chunks: list[Value], kind: Kind[Value]) -> list[Value]:
        """The chunks after the last round."""
        for each in rounds:
            sends, receives = each.sent_by(self._rank).rows(), each.received_by(self._rank).rows()
            if not sends and not receives:
                continue
            outgoing = [
                (destination, kind.to_bytes(chunks[chunk : chunk + span]))
                for _, destination, chunk, span, _ in sends
            ]
            incoming = self._exchange(outgoing, [row[0] for row in receives])
            chunks = _received(chunks, receives, incoming, kind, self._rank)
        return chunks

    def _exchange(
        self, outgoing: list[tuple[int, np.ndarray]], sources: list[int]
    ) -> list[np.ndarray]:
        """All messages of a round; back when those for this rank are delivered."""
        headers, tag = [np.zeros(2) for _ in sources], self._patience.tag
        requests = [
            self._comm.Irecv(h, source, tag) for h, source in zip(headers, sources, strict=True)
        ]
        turn = self._emulation.turn() if self._emulation and outgoing else 0
        for destination, data in outgoing:
            ticket = 0.0
            if self._emulation:
                ticket = self._emulation.depart(destination, data.nbytes, turn)
                for moment in self._emulation.holds(ticket):
                    self._sleep_until(moment)
            header = np.array([ticket, float(data.nbytes)])
            requests.append(self._comm.Isend(header, destination, tag))
            self._patience.count_to(destination, data.nbytes)
        self._wait(requests)
        incoming = [np.zeros(int(header[1]), np.uint8) for header in headers]
        seals: list[Seal] = []
        requests = []
        for data, source in zip(incoming, sources, strict=True):
            requests += self._wire.expect(data, source, tag, seals)
        for destination, data in outgoing:
            requests += self._wire.post(data, destination, tag)
        self._wait(requests)
        self._wire.verify(seals)
        if self._emulation and sources:
            arrivals = [
                (float(header[0]), source, int(header[1]))
                for header, source in zip(headers, sources, strict=True)
            ]
            for moment in self._emulation.deliveries(arrivals):
                self._sleep_until(moment)
        return incoming


def _received(
    chunks: list[Value],
    receives: list[tuple[int, int, int, int, bool]],
    incoming: list[np.ndarray],
    kind: Kind[Value],
    rank: int,
) -> list[Value]:
    """The chunks after a round: replaced, or added in order of rank, the own value included."""
    after = list(chunks)
    contributions: dict[int, list[tuple[int, Value]]] = {}
    for (source, _, chunk, span, reduce), data in zip(receives, incoming, strict=True):
        for number, value in enumerate(kind.from_bytes(data, chunk, span), start=chunk):
            if reduce:
                found = contributions.setdefault(number, [(rank, chunks[number])])
                found.append((source, value))
            else:
                after[number] = value
    for number, found in contributions.items():
        ordered = sorted(found, key=lambda pair: pair[0])
        after[number] = kind.add([value for _, value in ordered])
    return after
