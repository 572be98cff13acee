"""The transport of labkit's own messages, with optional checksums and injected faults."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator.fault_injector import Injector

if TYPE_CHECKING:
    from labkit.communicator.wait_policy import WaitPolicy


class Corrupted(LabkitError):
    """A received message differs from the message that was sent."""


@dataclass
class MessageRules:
    """The rules for all messages that labkit sends from a rank, on all its communicators.

    Attributes:
        checks: Whether each message carries a checksum.
        injector: The injector that drops or corrupts messages; None: no faults.
    """

    checks: bool = False
    injector: Injector | None = None


class Seal(NamedTuple):
    """A message with a checksum that the rank has not received completely.

    Attributes:
        data: The receive buffer for the bytes of the message.
        peer: The rank of the sender.
        checksum: The receive buffer for the sender's checksum, a single uint32.
    """

    data: np.ndarray
    peer: int
    checksum: np.ndarray


class MpiWire:
    """The sends and receives on one MPI communicator, with checksums and injected faults.

    Args:
        comm: The mpi4py communicator.
        rules: The rules for checksums and fault injection; None: no rules.
        wait_policy: The wait policy of this rank, which supplies the name of the call for error
            messages.
            With None, error messages contain no name of a call.
    """

    def __init__(
        self, comm: Any, rules: MessageRules | None = None, wait_policy: WaitPolicy | None = None
    ) -> None:
        self.comm, self._rules, self._wait_policy = comm, rules or MessageRules(), wait_policy

    def outgoing(self, data: np.ndarray, peer: int) -> np.ndarray | None:
        """Return the data to send to a rank after fault injection; None if a fault drops them."""
        self._tally("sent", peer)
        injector = self._rules.injector
        return data if injector is None else injector.outgoing(data)

    def post(self, data: np.ndarray, peer: int, tag: int, number: int = 0) -> list[Any]:
        """Begin to send bytes, which must not change until the returned requests are complete.

        Args:
            data: The bytes to send.
            peer: The rank that receives the message.
            tag: The MPI tag of the message.
            number: The number of the schedule's round, which is the initial value of the checksum;
                0: no round.
        """
        sent = self.outgoing(data, peer)
        if sent is None:
            return []
        requests = [self.comm.Isend(sent, peer, tag)]
        if self._rules.checks:
            crc = np.array([checksum(data, number)], np.uint32)
            requests.append(self.comm.Isend(crc.view(np.uint8), peer, tag))
        return requests

    def expect(self, data: np.ndarray, peer: int, tag: int, seals: list[Seal]) -> list[Any]:
        """Start to receive bytes; with checksums, also append to `seals` an entry for `verify`."""
        requests = [self.comm.Irecv(data, peer, tag)]
        if self._rules.checks:
            seals.append(Seal(data, peer, np.zeros(1, np.uint32)))
            requests.append(self.comm.Irecv(seals[-1].checksum.view(np.uint8), peer, tag))
        return requests

    def verify(self, seals: Sequence[Seal], number: int = 0) -> None:
        """Raise `Corrupted` for the first received message in `seals` that has a wrong checksum."""
        for data, peer, expected in seals:
            self.compare(data, int(expected[0]), peer, number)

    def header_checksum(self, data: np.ndarray) -> float:
        """Return the checksum of data for a message's header; 0 if checksums are off."""
        return float(checksum(data)) if self._rules.checks else 0.0

    def compare(
        self, data: np.ndarray, expected: int, peer: int, number: int | None = None
    ) -> None:
        """Raise `Corrupted` if the checksum of a received message is wrong.

        Args:
            data: The received bytes.
            expected: The checksum that the sender computed.
            peer: The rank of the sender.
            number: The number of the schedule's round; None: the message is not part of a schedule.
        """
        self._tally("got", peer)
        if not self._rules.checks or expected == checksum(data, number or 0):
            return
        place = "" if self._wait_policy is None else f" in {self._wait_policy.call_name}"
        turn = "" if number is None else f", round {number}"
        error = Corrupted(
            f"a message of {data.nbytes} bytes from rank {peer} to rank "
            f"{self.comm.rank}{place}{turn} differs from what was sent, because its checksum is "
            "wrong: a bit flipped during the transfer, or an earlier message was lost"
        )
        if self._wait_policy is not None:
            # TensorFlow hides this error inside another error.
            self._wait_policy.first_error = error
        raise error

    def _tally(self, kind: str, peer: int) -> None:
        """Count a message that has a checksum, so that a timeout error can report lost messages."""
        if self._rules.checks and self._wait_policy is not None:
            self._wait_policy.tally(kind, peer)


def checksum(data: np.ndarray, number: int = 0) -> int:
    """Return the CRC-32 of contiguous bytes; `number` is the initial value of the CRC-32."""
    return zlib.crc32(data.view(np.uint8).data, number)
