"""What labkit itself sends from rank to rank: as it is, with a checksum, or with a fault in it."""

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
    """A message did not arrive as it was sent."""


@dataclass
class Rules:
    """What holds for all messages of a rank, whichever communicator carries them.

    Attributes:
        checks: whether a checksum travels with each.
        injector: plants faults in them; None: nobody does.
    """

    checks: bool = False
    injector: Injector | None = None


class Seal(NamedTuple):
    """A message that is awaited, from whom, and where its checksum arrives."""

    data: np.ndarray
    peer: int
    told: np.ndarray


class Wire:
    """Messages of one communicator of MPI.

    Args:
        comm: carries them.
        rules: what holds for them.
        patience: of this rank, whose calls have names; None: an error names none.
    """

    def __init__(
        self, comm: Any, rules: Rules | None = None, patience: WaitPolicy | None = None
    ) -> None:
        self.comm, self._rules, self._patience = comm, rules or Rules(), patience

    def outgoing(self, data: np.ndarray, peer: int) -> np.ndarray | None:
        """What leaves in the place of these values for a rank; None: nothing does."""
        self._tally("sent", peer)
        injector = self._rules.injector
        return data if injector is None else injector.outgoing(data)

    def post(self, data: np.ndarray, peer: int, tag: int, number: int = 0) -> list[Any]:
        """Begin to send bytes, which stay as they are until the requests are complete.

        Args:
            number: of the round; a message of another one has another checksum.
        """
        sent = self.outgoing(data, peer)
        if sent is None:
            return []
        requests = [self.comm.Isend(sent, peer, tag)]
        if self._rules.checks:
            ndarray = np.array([checksum(data, number)], np.uint32)
            requests.append(self.comm.Isend(ndarray.view(np.uint8), peer, tag))
        return requests

    def expect(self, data: np.ndarray, peer: int, tag: int, seals: list[Seal]) -> list[Any]:
        """Begin to receive bytes; what there will be to verify is put to the seals."""
        requests = [self.comm.Irecv(data, peer, tag)]
        if self._rules.checks:
            seals.append(Seal(data, peer, np.zeros(1, np.uint32)))
            requests.append(self.comm.Irecv(seals[-1].told.view(np.uint8), peer, tag))
        return requests

    def verify(self, seals: Sequence[Seal], number: int = 0) -> None:
        """Raise Corrupted for the first message that is not what was sent."""
        for data, peer, told in seals:
            self.compare(data, int(told[0]), peer, number)

    def told(self, data: np.ndarray) -> float:
        """The checksum of a letter, in its head; 0 where none are asked for."""
        return float(checksum(data)) if self._rules.checks else 0.0

    def compare(self, data: np.ndarray, told: int, peer: int, number: int | None = None) -> None:
        """Raise Corrupted where a message from a rank is not what was sent."""
        self._tally("got", peer)
        if not self._rules.checks or told == checksum(data, number or 0):
            return
        place = "" if self._patience is None else f" in {self._patience.place}"
        turn = "" if number is None else f", round {number}"
        error = Corrupted(
            f"a message of {data.nbytes} bytes from rank {peer} to rank {self.comm.rank}{place}"
            f"{turn} is not what was sent: its checksum is wrong; a bit was flipped on its way, or "
            "a message before it was lost"
        )
        if self._patience is not None:
            self._patience.trouble = error  # TensorFlow hides it in an error of its own
        raise error

    def _tally(self, kind: str, peer: int) -> None:
        """Count messages where they have checksums, so that a lost one has a name in the end."""
        if self._rules.checks and self._patience is not None:
            self._patience.tally(kind, peer)


def checksum(data: np.ndarray, number: int = 0) -> int:
    """CRC-32 of contiguous bytes."""
    return zlib.crc32(data.view(np.uint8).data, number)
