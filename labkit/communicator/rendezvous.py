"""One-sided messages of any length: the sender notifies the receiver, which reads the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.eager import HEAD, LINE, EagerMailbox, lines
from labkit.communicator.emulation import Emulation
from labkit.communicator.mailbox import LENGTH, Letter, Route, make_header, open_letter
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.window import Window

MIN_SEND_BYTES = 1 << 16  # the minimum bytes of a send buffer
# A notice consists of a header and three numbers about one part of the values. These are its offset
# in the sender's memory, its length in bytes, and the index of its first byte.
_PLACE = LENGTH
_NOTICE = _PLACE + 3
assert 8 * (1 + _NOTICE) <= HEAD  # the message number and the notice must fit into a slot's header


class RendezvousMailbox(EagerMailbox):
    """A mailbox whose receivers read the values from the senders' memory.

    Each route (sender, receiver) has a fixed slot for notices in the receiver's memory, and a send
    buffer in the sender's memory. The sender copies values into its send buffer, and writes a
    notice with their offset and length in bytes. The receiver of a notice then allocates memory and
    reads the values. Values that are longer than the send buffer are sent in several parts.
    Therefore the receiver need not know the length of values, such as compressed payloads, in
    advance.

    On an emulated network, one message takes three latencies: for an empty notice, for a request,
    and for the transfer of the values. A message of `EagerMailbox` takes only one latency.

    Args:
        window, wait_policy, emulation, hosts: The same arguments as those of `EagerMailbox`.
        routes: For each pair of endpoints (sender, receiver), the size of the send buffer in bytes;
            at least 64 KiB are allocated.

    Source: J. Xue, Y. Miao, C. Chen, M. Wu, L. Zhang, L. Zhou: Fast distributed deep learning over
    RDMA, EuroSys 2019: for a tensor of unknown shape, the sender writes metadata to a fixed memory
    area. In this paper, the receiver then allocates memory and reads the tensor. In the paper, the
    tensor is in RDMA-registered memory from the start; in labkit, the sender copies the values into
    such memory.
    """

    in_place: ClassVar[bool] = False  # the receiver gets a copy of the values

    def __init__(
        self,
        window: Callable[[int], Window],
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        hosts: Sequence[int],
        routes: Mapping[Route, int],
    ) -> None:
        super().__init__(window, wait_policy, emulation, hosts, routes)
        self._bytes_sent: dict[
            Route, int
        ] = {}  # bytes of the current message that were already sent in parts
        self._partial: dict[Route, NDArray[np.uint8]] = {}

    def _slot_bytes(self, capacity: int) -> int:
        return 0

    def _send_bytes(self, capacity: int) -> int:
        return lines(max(capacity, MIN_SEND_BYTES))

    def _validate_size(self, route: Route, nbytes: int) -> None:
        """Accept values of any length."""

    def _write(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> bool:
        begin, offset = self._bytes_sent.pop(route, 0), self._reads[route] + LINE
        part = values[begin:][: self._send_bytes(self._capacities[route])]
        self._window.memory[offset : offset + part.nbytes] = part
        notice = np.zeros(_NOTICE)
        notice[:_PLACE] = make_header(route, self._wait_policy.clock.now(), words, values)
        notice[_PLACE:] = offset, part.nbytes, begin
        self._window.sync()  # the values must be visible to the receiver before the notice
        self._write_header(route, notice)
        if begin == 0:
            self._count(route, values.nbytes)
        if begin + part.nbytes == values.nbytes:
            return True
        self._bytes_sent[route] = begin + part.nbytes
        return False

    def _receive(self, route: Route) -> Letter | None:
        head, source = self._heads[route][1:], self._hosts[route[0]]
        offset, nbytes, begin = (int(word) for word in head[_PLACE:_NOTICE])
        if begin == 0:
            self._partial[route] = np.empty(int(head[0]), np.uint8)
        values = self._partial[route]
        if nbytes:
            self._window.read(values[begin : begin + nbytes], source, offset)
        if begin + nbytes < values.nbytes:
            self._unfreed.add(route)
            self.free(route)  # allows the sender to send the next part
            return None
        letter = open_letter(head, self._partial.pop(route), None, source)
        if self._emulation:
            letter.delay_until(
                self._fetch_moments(self._emulation, source, values.nbytes, float(head[1]))
            )
        return letter

    def _fetch_moments(
        self, emulation: Emulation, source: int, nbytes: int, sent_at: float
    ) -> Iterator[float]:
        """Yield when the notice and the request arrive, then wake-up times until delivery."""
        yield sent_at + 2 * emulation.network.latency
        yield from emulation.transfer(source, self._wait_policy.rank, nbytes)
