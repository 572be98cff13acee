"""Execution of schedules over values of variable size, such as payloads and sparse sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import MessageRules, MpiWire, Seal
from labkit.schedules import Round

Value = TypeVar("Value")


class ValueKind(Protocol[Value]):
    """The addition and serialization of one type of values."""

    def add(self, values: Sequence[Value]) -> Value:
        """Return the sum of the values, added in the given order."""

    def to_bytes(self, values: Sequence[Value]) -> np.ndarray:
        """Serialize the values into one message, an array of uint8."""

    def from_bytes(self, data: np.ndarray, first: int, count: int) -> list[Value]:
        """Return the values in a message, for chunks `first` to `first + count - 1`."""


class VariableSizeExecutor:
    """An executor of this rank's sends and receives in a schedule with chunks of any size.

    A header with the message's length precedes each message. The traffic meter does not count these
    length headers, like the headers of MPI.

    Args:
        wait_policy: The wait policy of this rank, with its communicator and traffic meter.
        emulation: The emulated network; None: the real network.
        rules: The rules for checksums and fault injection in all messages.
    """

    def __init__(
        self,
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        rules: MessageRules | None = None,
    ) -> None:
        self._wire = MpiWire(wait_policy.comm, rules, wait_policy)
        self._comm, self._rank, self._emulation = wait_policy.comm, wait_policy.rank, emulation
        self._wait_policy, self._traffic, self._wait = (
            wait_policy,
            wait_policy.traffic,
            wait_policy.wait_all,
        )
        self._sleep_until = wait_policy.sleep_until

    def run(
        self, rounds: Sequence[Round], chunks: list[Value], kind: ValueKind[Value]
    ) -> list[Value]:
        """Run the rounds of a schedule, and return the chunks after the last round.

        Args:
            rounds: The rounds of the schedule.
            chunks: The initial values of this rank, one per chunk.
            kind: The object that adds and serializes the values.
        """
        for step in rounds:
            sends, receives = step.sent_by(self._rank).rows(), step.received_by(self._rank).rows()
            if not sends and not receives:
                continue
            outgoing = [
                (destination, kind.to_bytes(chunks[chunk : chunk + span]))
                for _, destination, chunk, span, _ in sends
            ]
            incoming = self._exchange(outgoing, [row[0] for row in receives])
            chunks = _merge_received(chunks, receives, incoming, kind, self._rank)
        return chunks

    def _exchange(
        self, outgoing: list[tuple[int, np.ndarray]], sources: list[int]
    ) -> list[np.ndarray]:
        """Send and receive all messages of a round; return after their delivery."""
        headers, tag = [np.zeros(2) for _ in sources], self._wait_policy.tag
        requests = [
            self._comm.Irecv(h, source, tag) for h, source in zip(headers, sources, strict=True)
        ]
        turn = self._emulation.turn() if self._emulation and outgoing else 0
        for destination, data in outgoing:
            ticket = 0.0
            if self._emulation:
                ticket = self._emulation.depart(destination, data.nbytes, turn)
                for moment in self._emulation.send_moments(ticket):
                    self._sleep_until(moment)
            header = np.array([ticket, float(data.nbytes)])
            requests.append(self._comm.Isend(header, destination, tag))
            self._wait_policy.count_to(destination, data.nbytes)
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


def _merge_received(
    chunks: list[Value],
    receives: list[tuple[int, int, int, int, bool]],
    incoming: list[np.ndarray],
    kind: ValueKind[Value],
    rank: int,
) -> list[Value]:
    """Return the chunks after a round; each received value replaces a chunk or is added to it."""
    after = list(chunks)
    contributions: dict[int, list[tuple[int, Value]]] = {}
    for (source, _, chunk, span, reduce), data in zip(receives, incoming, strict=True):
        for number, value in enumerate(kind.from_bytes(data, chunk, span), start=chunk):
            if reduce:
                terms = contributions.setdefault(number, [(rank, chunks[number])])
                terms.append((source, value))
            else:
                after[number] = value
    for number, terms in contributions.items():
        ordered = sorted(terms, key=lambda pair: pair[0])
        after[number] = kind.add([value for _, value in ordered])
    return after
