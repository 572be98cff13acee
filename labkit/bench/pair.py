"""Two ranks joined by TCP, which carry out the same plans with the same executor as MPI's."""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from labkit.bench.timing import sweep
from labkit.common.errors import LabkitError
from labkit.communicator.clock import WALL
from labkit.communicator.executor import Executor
from labkit.communicator.rank_plan import Plan, plan
from labkit.communicator.wire import Wire as Messages
from labkit.schedules import ALLREDUCE

T = TypeVar("T")

PORT = 20000
LIMIT = 30.0  # seconds without a byte
LEAD = 3e-3  # seconds from the agreement on a start to the start: both have heard of it by then
PINGS = 300
IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")  # of the reader's own namespace


class Wire:
    """One stream connection with what the executor asks of MPI: Isend, Irecv and a wait for all.

    Sending and receiving go on at the same time. With two ranks there is one peer, and the
    order of a stream is the order of its messages: no tags are needed.
    """

    def __init__(self, connection: socket.socket) -> None:
        # Both directions at once in one thread: a send that blocks would keep this rank from
        # receiving.
        connection.setblocking(False)
        self._connection = connection
        self._sends: list[memoryview] = []
        self._receives: list[memoryview] = []

    def Isend(self, data: np.ndarray, peer: int, tag: int) -> None:  # noqa: N802 (mpi4py's name)
        """Send these bytes in the next `wait`."""
        self._sends.append(data.data.cast("B"))

    def Irecv(self, data: np.ndarray, peer: int, tag: int) -> None:  # noqa: N802 (mpi4py's name)
        """Fill these bytes in the next `wait`."""
        self._receives.append(data.data.cast("B"))

    def wait(self, _: Sequence[None]) -> None:
        """Complete all sends and receives. Raises: LabkitError, when nothing moves."""
        wire = [self._connection]
        while self._sends or self._receives:
            readable, writable, _ = select.select(
                wire if self._receives else [], wire if self._sends else [], [], LIMIT
            )
            if not (readable or writable):
                raise LabkitError(f"nothing has moved over the link for {LIMIT:.0f} s")
            if readable:
                received = self._connection.recv_into(self._receives[0])
                if received == 0:
                    raise LabkitError("the other rank has closed the connection")
                _advance(self._receives, received)
            if writable:
                _advance(self._sends, self._connection.send(self._sends[0]))


class Pair:
    """The ranks at the two ends of a `Wire`, as far as `timing.Ranks` asks."""

    size = 2

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self._wire = Wire(connection)
        wait, until = self._wire.wait, WALL.sleep_until
        self._executor = Executor(
            Messages(self._wire), lambda *_: None, lambda requests, _: wait(requests), until, None
        )
        self._plans: dict[tuple[str, int], Plan] = {}

    def allreduce(self, buffer: np.ndarray, algorithm: str) -> None:
        """Carry out the schedule of this name, as MPI's ranks do."""
        key = (algorithm, len(buffer))
        if key not in self._plans:
            self._plans[key] = plan(ALLREDUCE[algorithm](self.size), self.rank, len(buffer))
        self._executor.run(self._plans[key], buffer, tag=0)

    def meet(self, what: str = "") -> None:
        """Agree on a moment of the clock that both ends share, and wait for it."""
        ready = self.allgather(WALL.now())
        WALL.sleep_until(max(ready) + LEAD)

    def allgather(self, value: T) -> list[T]:
        """The values of both ranks, as JSON."""
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = self._exchange(np.frombuffer(struct.pack("!q", len(own)), np.uint8), 8)
        (theirs,) = struct.unpack("!q", length)
        other = json.loads(self._exchange(own, theirs))
        return [value, other] if self.rank == 0 else [other, value]

    def warm_up(self) -> None:
        """Open TCP's windows, as far as the link is wide: a MiB in both directions at a time."""
        self._exchange(np.zeros(2**20, np.uint8), 2**20)

    def latency(self) -> float:
        """Half the median round trip of one byte, in s; the same value on both ranks."""
        byte = np.zeros(1, np.uint8)
        trips = []
        for _ in range(PINGS):
            start = WALL.now()
            for sender in (0, 1):
                (self._wire.Isend if self.rank == sender else self._wire.Irecv)(byte, 0, 0)
                self._wire.wait([])
            trips.append(WALL.now() - start)
        half: float = self.allgather(float(np.median(trips)) / 2)[0]
        return half

    def _exchange(self, data: np.ndarray, theirs: int) -> bytes:
        received = np.zeros(theirs, np.uint8)
        self._wire.Isend(data, 1 - self.rank, 0)
        self._wire.Irecv(received, 1 - self.rank, 0)
        self._wire.wait([])
        return received.tobytes()


def _advance(queue: list[memoryview], nbytes: int) -> None:
    queue[0] = queue[0][nbytes:]
    if not queue[0]:
        del queue[0]


def connections(rank: int, address: str, number: int = 1) -> list[socket.socket]:
    """This rank's ends of so many; rank 0 says that it listens before rank 1 calls."""
    # Reno opens its window until something is lost, and here nothing is: the link alone decides.
    reno = (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    with suppress(OSError):  # read-only in some containers; a paused connection then restarts slow
        IDLE.write_text("0")
    with ExitStack() as opened:
        ends = [opened.enter_context(socket.socket()) for _ in range(number if rank else 1)]
        for end in ends:
            end.setsockopt(*reno)
            end.settimeout(LIMIT)
        if rank == 0:
            ends[0].bind((address, PORT))
            ends[0].listen(number)
        print("ready", flush=True)
        sys.stdin.readline()
        if rank == 0:
            return [ends[0].accept()[0] for _ in range(number)]
        for end in ends:
            end.connect((address, PORT))
        return [end.dup() for end in ends]


def main() -> None:
    """`python -m labkit.bench.pair RANK ADDRESS`: cases from stdin, a line each, results out."""
    rank, address = int(sys.argv[1]), sys.argv[2]
    with connections(rank, address)[0] as connection:
        # Nagle's algorithm would hold back the last part of each message until the first is
        # acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = Pair(connection, rank)
        pair.warm_up()
        payload = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        print(json.dumps({"latency": pair.latency(), "payload": payload}), flush=True)
        for line in sys.stdin:
            print(json.dumps(sweep(pair, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
