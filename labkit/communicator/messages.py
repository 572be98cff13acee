"""Point-to-point messages on the real network or on an emulated network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import MessageRules, MpiWire, Seal

if TYPE_CHECKING:
    from mpi4py import MPI

_USER_TAG = 1 << 14  # the first MPI tag of `send` and `recv`; mailboxes use lower tags


class Messages:
    """Point-to-point sends and receives of one rank, which use their own range of MPI tags.

    Args:
        wait_policy: The wait policy of this rank, with its communicator and traffic meter.
        emulation: The emulated network; None: the real network.
        rules: Checksum and fault-injection rules, which apply to all messages.
    """

    def __init__(
        self,
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        rules: MessageRules | None = None,
    ) -> None:
        self._comm, self._wait_policy, self._emulation = wait_policy.comm, wait_policy, emulation
        self._traffic, self._clock = wait_policy.traffic, wait_policy.clock
        self._wire = MpiWire(wait_policy.comm, rules, wait_policy)

    def send(self, data: np.ndarray, destination: int, tag: int = 0) -> None:
        """Send a contiguous array; when this method returns, the caller may change the array."""
        self.finish(self.post(data, destination, tag), f"send to rank {destination}")

    def post(self, data: np.ndarray, destination: int, tag: int = 0) -> list[MPI.Request]:
        """Begin to send a contiguous array, which must not change until `finish` has returned."""
        requests = []
        with self._wait_policy.failure_guard:
            if self._emulation:
                ticket = np.array([self._emulation.depart(destination, data.nbytes)])
                requests.append(self._comm.Isend(ticket, destination, _USER_TAG + tag))
            requests += self._wire.post(_bytes(data), destination, _USER_TAG + tag)
        self._traffic.payload_bytes += data.nbytes
        self._wait_policy.count_to(destination, data.nbytes)
        return requests

    def finish(
        self, posted: list[MPI.Request], label: str = "the completion of a sent message"
    ) -> None:
        """Wait until the posted sends are complete; their arrays may change afterwards."""
        self._wait_policy.name_call(label, collective=False)
        self._wait_policy.wait_all(posted)

    def recv(self, data: np.ndarray, source: int, tag: int = 0) -> None:
        """Receive a message into a contiguous array; return when the message is delivered."""
        self._wait_policy.name_call(f"recv from rank {source}", collective=False)
        header, requests = np.zeros(1), []
        seals: list[Seal] = []
        with self._wait_policy.failure_guard:
            if self._emulation:
                requests.append(self._comm.Irecv(header, source, _USER_TAG + tag))
            requests += self._wire.expect(_bytes(data), source, _USER_TAG + tag, seals)
        self._wait_policy.wait_all(requests)
        self._wire.verify(seals)
        if self._emulation:
            start = self._clock.now()
            for moment in self._emulation.deliveries([(float(header[0]), source, data.nbytes)]):
                self._wait_policy.sleep_until(moment)
            self._traffic.transfer_seconds += self._clock.now() - start


def _bytes(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1).view(np.uint8)
