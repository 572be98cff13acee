"""The transport of labkit's own messages, with optional checksums and injected faults."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator.emulation import Emulation
from labkit.communicator.fault_injector import Injector
from labkit.communicator.wait_policy import WaitPolicy

if TYPE_CHECKING:
    from mpi4py import MPI

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
    """A message with a checksum that is being received, with its buffers and its sender.

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
            If `wait_policy` is None, error messages contain no name of a call.
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
        """Start to receive bytes; with checksums, add an entry to `seals` for a later `verify`."""
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
            # The attribute `first_error` stores labkit's error, because TensorFlow hides the error
            # inside another error.
            self._wait_policy.first_error = error
        raise error

    def _tally(self, kind: str, peer: int) -> None:
        """Count a message with a checksum, so that a timeout error can report lost messages."""
        if self._rules.checks and self._wait_policy is not None:
            self._wait_policy.tally(kind, peer)


def checksum(data: np.ndarray, number: int = 0) -> int:
    """Return the CRC-32 of contiguous bytes; `number` is the initial value of the CRC-32."""
    return zlib.crc32(data.view(np.uint8).data, number)


def validate_summable(dtype: np.dtype[Any], mean: bool = False) -> None:
    """Raise an error if values of `dtype` cannot be summed, or averaged if `mean` is True.

    Raises:
        InvalidInput: Values of `dtype` cannot be summed or averaged; the message lists allowed
            dtypes and suggests a conversion.
    """
    if is_float(dtype) or (dtype.kind in "iu" and not mean):
        return
    floats = "float16, bfloat16, float32, float64"
    if mean:
        allowed, advice = f"averaged; allowed: {floats}", "give buffer.astype(np.float64)"
    else:
        allowed = f"summed; allowed: {floats} and integers"
        advice = (
            "to combine flags, sum buffer.astype(np.int32): the sum is above 0 where any "
            "rank has set the flag"
        )
    raise InvalidInput(f"a buffer of dtype {dtype.name} cannot be {allowed}; {advice}")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is a float type; unlike in NumPy, bfloat16 counts as one."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def is_16_bit_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is a 16-bit float type, whose values are added in float32."""
    return dtype.itemsize == 2 and is_float(dtype)


def scale(buffer: np.ndarray, share: float) -> None:
    """Multiply floats in place; for 16-bit floats, the factor is not rounded to 16 bits.

    Args:
        buffer: The array of floats to multiply.
        share: The factor, such as a rank's share of the total weight.
    """
    if is_16_bit_float(buffer.dtype):
        np.multiply(buffer, np.float32(share), out=buffer, dtype=np.float32, casting="unsafe")
    else:
        buffer *= buffer.dtype.type(share)


# The MPI tags of `send` and `recv` start at `_USER_TAG`; mailboxes use lower tags.
_USER_TAG = 1 << 14


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
