"""Processes at the ends of a network link, which answer requests by lines of JSON.

The module is also the program of two ranks that are connected by TCP. The two ranks execute the
same schedules as MPI ranks.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from labkit.bench.timing import sweep
from labkit.common.errors import LabkitError
from labkit.communicator.clock import WALL
from labkit.communicator.executor import Executor, RankPlan, plan
from labkit.communicator.wire import MpiWire as Messages
from labkit.frameworks.namespaces import ADDRESSES, command_prefix, rate_limited_link
from labkit.schedules import ALLREDUCE

END = 5.0  # labkit kills a process that has not ended after END seconds.
T = TypeVar("T")
PORT = 20000
# The constant LIMIT is the maximum time in seconds without a transfer. After LIMIT seconds without
# a transfer, labkit raises an error.
LIMIT = 30.0
LEAD = 3e-3  # The ranks agree on a start time that is LEAD seconds in the future.
PINGS = 300
IDLE = Path(
    "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
)  # path of a TCP setting of this process's network namespace


class LinkedProcesses:
    """Processes that work together, and exchange lines of JSON with this process.

    Args:
        processes: The started processes: one process per rank, or one process that answers for all
            ranks. Each process writes one line when it is ready, and then waits for an input line.

    Attributes:
        ready: First output line of each process.
    """

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        # Rank 1 may connect only after rank 0 has printed that it listens.
        self.ready = self._read_lines()
        self._write("")

    def ask(self, cases: object) -> None:
        """Send the same cases to all ranks."""
        self._write(json.dumps(cases))

    def answer(self) -> str:
        """Wait for all ranks, and return rank 0's answer; raise LabkitError if a rank has ended."""
        return self._read_lines()[0]

    def end(self) -> list[str]:
        """Kill all ranks and return the last stderr line of each."""
        for process in self._processes:
            process.kill()
        errors = [process.communicate()[1].strip() for process in self._processes]
        return [text.splitlines()[-1] if text else "nothing" for text in errors]

    def _write(self, line: str) -> None:
        # A broken pipe is ignored here, because `_read_lines` reports a rank that has ended.
        with suppress(BrokenPipeError):
            for process in self._processes:
                # The type checker does not know that `process.stdin` is a pipe.
                assert process.stdin is not None
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def _read_lines(self) -> list[str]:
        lines = []
        for process in self._processes:
            # The type checker does not know that `process.stdout` is a pipe.
            assert process.stdout is not None
            lines.append(process.stdout.readline())
            if not lines[-1]:
                errors = "; ".join(f"rank {k}: {text}" for k, text in enumerate(self.end()))
                raise LabkitError(
                    "the processes of a benchmark ended before the measurement was complete; "
                    f"{errors}"
                )
        return lines


def _end(process: subprocess.Popen[str]) -> None:
    """Close a process's stdin, so that the process (or mpiexec) ends; kill it after a timeout."""
    # The type checker does not know that `process.stdin` is a pipe.
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END)
    process.kill()


@contextmanager
def linked_ranks(bits: int, program: str, flows: int = 1) -> Iterator[LinkedProcesses]:
    """Start two ranks on a new link, and remove the link at the end."""
    with rate_limited_link(bits, flows) as namespaces:
        run = [sys.executable, "-P", "-m", program]
        commands = [
            [*command_prefix(namespace), *run, str(rank), ADDRESSES[0]]
            for rank, namespace in enumerate(namespaces)
        ]
        with started(commands) as ranks:
            yield ranks


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> Iterator[LinkedProcesses]:
    """Start one process per command; end the processes when the context exits.

    Args:
        commands: Command of each process.
        environment: Environment variables of the started processes; None: this process's variables.
    """
    with ExitStack() as opened:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                # Each process has its own session, so that Ctrl-C does not reach the process. After
                # Ctrl-C, labkit itself ends all processes.
                start_new_session=True,
            )
            opened.enter_context(process)
            opened.callback(_end, process)
            processes.append(process)
        yield LinkedProcesses(processes)


class StreamWire:
    """A TCP connection with MPI-like calls: Isend, Irecv and a wait for all queued transfers.

    Sends and receives proceed concurrently. Tags are ignored, because each of the two ranks has
    only one peer. A TCP stream preserves the order of messages.
    """

    def __init__(self, connection: socket.socket) -> None:
        # The socket does not block, because one thread sends and receives, and a blocking send
        # would delay receives.
        connection.setblocking(False)
        self._connection = connection
        self._sends: list[memoryview] = []
        self._receives: list[memoryview] = []

    def Isend(self, data: np.ndarray, peer: int, tag: int) -> None:  # noqa: N802 (mpi4py's name)
        """Queue an array that the next `wait` sends."""
        self._sends.append(data.data.cast("B"))

    def Irecv(self, data: np.ndarray, peer: int, tag: int) -> None:  # noqa: N802 (mpi4py's name)
        """Queue an array that the next `wait` fills with received bytes."""
        self._receives.append(data.data.cast("B"))

    def wait(self, _: Sequence[None]) -> None:
        """Finish all queued transfers; raise LabkitError after LIMIT seconds without progress."""
        wire = [self._connection]
        while self._sends or self._receives:
            readable, writable, _ = select.select(
                wire if self._receives else [], wire if self._sends else [], [], LIMIT
            )
            if not (readable or writable):
                raise LabkitError(f"no byte was sent or received over the link for {LIMIT:.0f} s")
            if readable:
                received = self._connection.recv_into(self._receives[0])
                if received == 0:
                    raise LabkitError("the other rank closed the connection")
                _advance(self._receives, received)
            if writable:
                _advance(self._sends, self._connection.send(self._sends[0]))


class RankPair:
    """A rank at one end of a TCP connection; it implements the protocol `timing.TimedRanks`."""

    size = 2

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self._wire = StreamWire(connection)
        wait, until = self._wire.wait, WALL.sleep_until
        self._executor = Executor(
            Messages(self._wire), lambda *_: None, lambda requests, _: wait(requests), until, None
        )
        self._plans: dict[tuple[str, int], RankPlan] = {}

    def allreduce(self, buffer: np.ndarray, algorithm: str) -> None:
        """Sum a buffer over both ranks with an algorithm's schedule, as MPI ranks do."""
        key = (algorithm, len(buffer))
        if key not in self._plans:
            self._plans[key] = plan(ALLREDUCE[algorithm](self.size), self.rank, len(buffer))
        self._executor.run(self._plans[key], buffer, tag=0)

    def barrier(self, label: str = "") -> None:
        """Agree with the other rank on a time of the shared clock, and sleep until that time."""
        ready = self.allgather(WALL.now())
        WALL.sleep_until(max(ready) + LEAD)

    def allgather(self, value: T) -> list[T]:
        """Return the values of both ranks in rank order; the ranks exchange values as JSON."""
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = self._exchange(np.frombuffer(struct.pack("!q", len(own)), np.uint8), 8)
        (theirs,) = struct.unpack("!q", length)
        other = json.loads(self._exchange(own, theirs))
        return [value, other] if self.rank == 0 else [other, value]

    def warm_up(self) -> None:
        """Exchange a MiB in both directions, so that the TCP congestion windows grow."""
        self._exchange(np.zeros(2**20, np.uint8), 2**20)

    def latency(self) -> float:
        """Return half the median round-trip time of one byte in seconds, equal on both ranks."""
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
    """Return `number` sockets to the other rank; rank 0 listens before rank 1 connects."""
    # TCP Reno grows its window until a packet is lost. The rate-limited link loses no packet, so
    # only the rate of the link limits a flow.
    reno = (socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    # Without permission to change the TCP setting, the benchmark still runs, but TCP slows down
    # idle flows.
    with suppress(OSError):
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
    """Run the cases of each line of stdin: `python -m labkit.bench.linked_ranks RANK ADDRESS`."""
    rank, address = int(sys.argv[1]), sys.argv[2]
    with connections(rank, address)[0] as connection:
        # Nagle's algorithm would delay the last bytes of each message until an acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = RankPair(connection, rank)
        pair.warm_up()
        payload = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        print(json.dumps({"latency": pair.latency(), "payload": payload}), flush=True)
        for line in sys.stdin:
            print(json.dumps(sweep(pair, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
