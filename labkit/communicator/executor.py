"""The executor, which runs this rank's plan of a schedule on real buffers over MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.rank_plan import PlannedMessage, PlannedRound, RankPlan
from labkit.communicator.wire import MpiWire, Seal


class Executor:
    """An executor of this rank's plans; a plan is a compiled schedule.

    Args:
        wire: The transport that sends and receives messages.
        count_to: A function of (rank, bytes) that counts a message to a rank in the traffic meter.
        wait: A function that waits for the MPI requests of a round, or raises an error after a
            timeout.
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
    """Write the sum of the terms into elements [first, last); add them in the order of `terms`."""
    local = buffer[first:last]
    parts = [local if offset < 0 else scratch[offset : offset + last - first] for offset in terms]
    # Two terms may be added in any order, because a + b has the same bits as b + a.
    if parts[0] is local or len(parts) == 2:
        others = parts[1:] if parts[0] is local else parts[:1]
        for part in others:
            np.add(local, part, out=local)
        return
    total = parts[0]
    for part in parts[1:]:
        np.add(total, part, out=total)
    local[...] = total
