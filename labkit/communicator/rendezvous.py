"""Letters of any length, one-sided: a notice at a fixed place, then a read by who wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.eager import HEAD, LINE, Slots, lines
from labkit.communicator.emulation import Emulation
from labkit.communicator.mailbox import LENGTH, Letter, Route, headed, opened
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.window import Window

LEAST = 1 << 16  # bytes of a stretch, however little is expected
# Behind the head a notice says the place and the bytes of the part, and its begin.
_PLACE = LENGTH
_NOTICE = _PLACE + 3
assert 8 * (1 + _NOTICE) <= HEAD  # beside its number


class Parcels(Slots):
    """A mailbox whose readers fetch: who sends lays values down, and says where and how many.

    What is fixed at the begin is the place of the notice at its reader, and a stretch of memory at
    its sender for each route. Values are laid into the stretch; the notice says their place and
    bytes; the reader allocates as many and reads them. Values that are longer than the stretch
    come in parts, so that no length has to be known, as that of a compressor's payload is not.

    On an emulated network a letter takes a message of no bytes, which is the notice, a request,
    and the values' flow: three latencies, of which `Slots` have one.

    Args:
        window, patience, emulation, hosts: as for `Slots`.
        routes: bytes of a stretch, by (who sends, who reads); 64 KiB at least.

    Source: J. Xue, Y. Miao, C. Chen, M. Wu, L. Zhang, L. Zhou: Fast distributed deep learning over
    RDMA, EuroSys 2019: of a tensor whose shape is not known before, the sender writes metadata to
    a fixed place, and the receiver allocates and reads. Theirs lies in memory that the network
    card may read from the begin; here the sender copies it there.
    """

    stay: ClassVar[bool] = False  # values are their reader's own

    def __init__(
        self,
        window: Callable[[int], Window],
        patience: WaitPolicy,
        emulation: Emulation | None,
        hosts: Sequence[int],
        routes: Mapping[Route, int],
    ) -> None:
        super().__init__(window, patience, emulation, hosts, routes)
        self._laid: dict[Route, int] = {}  # bytes of the letter that is under way
        self._partial: dict[Route, NDArray[np.uint8]] = {}

    def _room(self, capacity: int) -> int:
        return 0

    def _stretch(self, capacity: int) -> int:
        return lines(max(capacity, LEAST))

    def _fit(self, route: Route, nbytes: int) -> None:
        """All do."""

    def _put(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> bool:
        begin, place = self._laid.pop(route, 0), self._reads[route] + LINE
        part = values[begin:][: self._stretch(self._capacities[route])]
        self._window.memory[place : place + part.nbytes] = part
        notice = np.zeros(_NOTICE)
        notice[:_PLACE] = headed(route, self._patience.clock.now(), words, values)
        notice[_PLACE:] = place, part.nbytes, begin
        self._window.sync()  # before the notice says so
        self._tell(route, notice)
        if begin == 0:
            self._count(route, values.nbytes)
        if begin + part.nbytes == values.nbytes:
            return True
        self._laid[route] = begin + part.nbytes
        return False

    def _taken(self, route: Route) -> Letter | None:
        head, source = self._heads[route][1:], self._hosts[route[0]]
        place, nbytes, begin = (int(each) for each in head[_PLACE:_NOTICE])
        if begin == 0:
            self._partial[route] = np.empty(int(head[0]), np.uint8)
        values = self._partial[route]
        if nbytes:
            self._window.read(values[begin : begin + nbytes], source, place)
        if begin + nbytes < values.nbytes:
            self._open.add(route)
            self.free(route)  # the next part finds room
            return None
        letter = opened(head, self._partial.pop(route), None, source)
        if self._emulation:
            letter.due_at(self._fetched(self._emulation, source, values.nbytes, float(head[1])))
        return letter

    def _fetched(
        self, emulation: Emulation, source: int, nbytes: int, told: float
    ) -> Iterator[float]:
        """Moments to wait for: the notice and the request have come, then the values have."""
        yield told + 2 * emulation.network.latency
        yield from emulation.transfer(source, self._patience.rank, nbytes)
