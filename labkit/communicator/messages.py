"""Messages from one rank to another, on the real network or on an emulated one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import Rules, Seal, Wire

if TYPE_CHECKING:
    from mpi4py import MPI

_USER_TAG = 1 << 14  # tags of send and recv; those of schedules lie below


class Messages:
    """What one rank sends and receives point to point, with tags of its own.

    Args:
        patience: how this rank waits; its communicator carries the messages, its meter counts them.
        emulation: the network to emulate, or None.
        rules: what holds for all messages.
    """

    def __init__(
        self, patience: WaitPolicy, emulation: Emulation | None, rules: Rules | None = None
    ) -> None:
        self._comm, self._patience, self._emulation = patience.comm, patience, emulation
        self._traffic, self._clock = patience.traffic, patience.clock
        self._wire = Wire(patience.comm, rules, patience)

    def send(self, data: np.ndarray, destination: int, tag: int = 0) -> None:
        """Send a contiguous array; back when it may be changed again."""
        self.finish(self.post(data, destination, tag), f"send to rank {destination}")

    def post(self, data: np.ndarray, destination: int, tag: int = 0) -> list[MPI.Request]:
        """Begin to send a contiguous array, which must stay as it is until `finish`."""
        requests = []
        with self._patience.minding:
            if self._emulation:
                ticket = np.array([self._emulation.depart(destination, data.nbytes)])
                requests.append(self._comm.Isend(ticket, destination, _USER_TAG + tag))
            requests += self._wire.post(_bytes(data), destination, _USER_TAG + tag)
        self._traffic.payload_bytes += data.nbytes
        self._patience.count_to(destination, data.nbytes)
        return requests

    def finish(self, posted: list[MPI.Request], what: str = "the end of a message") -> None:
        """Wait until what was posted is on its way."""
        self._patience.enter(what, collective=False)
        self._patience.complete(posted)

    def recv(self, data: np.ndarray, source: int, tag: int = 0) -> None:
        """Receive into a contiguous array; back when the message is delivered."""
        self._patience.enter(f"recv from rank {source}", collective=False)
        header, requests = np.zeros(1), []
        seals: list[Seal] = []
        with self._patience.minding:
            if self._emulation:
                requests.append(self._comm.Irecv(header, source, _USER_TAG + tag))
            requests += self._wire.expect(_bytes(data), source, _USER_TAG + tag, seals)
        self._patience.complete(requests)
        self._wire.verify(seals)
        if self._emulation:
            start = self._clock.now()
            for moment in self._emulation.deliveries([(float(header[0]), source, data.nbytes)]):
                self._patience.sleep_until(moment)
            self._traffic.transfer_seconds += self._clock.now() - start


def _bytes(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1).view(np.uint8)
