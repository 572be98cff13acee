"""Communicator over MPI: what ranks say to each other, metered, and never a silent wait."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.communicator.algorithms import check_algorithm, library_allreduce, refuse_unmetered
from labkit.communicator.board import Board, Mismatch
from labkit.communicator.clock import WALL, Clock
from labkit.communicator.emulation import Emulation
from labkit.communicator.executor import Executor
from labkit.communicator.patience import Patience
from labkit.communicator.payloads import Payloads
from labkit.communicator.rank_plan import Plans
from labkit.communicator.shared_memory import Aside, SharedMemory
from labkit.communicator.traffic import Traffic
from labkit.communicator.variable import Courier
from labkit.communicator.window import Window
from labkit.network import Network

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT = 600.0  # seconds; the first step of a large model is traced for minutes
_USER_TAG = 1 << 14  # tags of send and recv; those of schedules lie below


class Communicator:
    """The ranks of one experiment, as this rank sees them.

    No wait is silent: a rank that has failed, one that does not come within `limit` seconds, and
    ranks of one host that wait for each other in different calls are noticed by those that wait,
    and named with the call they are in.

    Args:
        comm: an mpi4py communicator; the Communicator works on a duplicate of it.
        limit: seconds after which a wait raises `WaitTooLong`.
        network: a network to emulate for schedules, `send`, `recv` and windows; None: the real one.
        traffic: a meter to go on with; None: a new one.
        emulation: of the network, to go on with; None: a new one.
        outer: the patience of the ranks of which these are a part.
        clock: by which ranks wait and take times; the same for all of a host.

    Attributes:
        rank, size: this rank's number, and how many there are.
        traffic: what this rank has sent and how long it took.
        patience: how this rank waits. It remembers the first error that a wait has raised, which
            TensorFlow hides in one of its own. It is polite where this process computes while it
            waits: a loop would take its core, and hold the interpreter's lock for milliseconds.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        limit: float = LIMIT,
        network: str | Network | None = None,
        traffic: Traffic | None = None,
        emulation: Emulation | None = None,
        outer: Patience | None = None,
        clock: Clock = WALL,
    ) -> None:
        self._comm = comm.Dup()
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.network = Network.parse(network)
        self.traffic, self.clock = traffic or Traffic(), clock
        self.board = Board(self._comm, clock)
        self.patience = Patience(
            self.board, self.traffic, clock, self.rank, limit, self.on_one_host, outer
        )
        self.local_rank: int = self.board.local_rank  # among the ranks of this host
        if self.network and emulation is None:
            emulation = Emulation(self._comm, self.network, clock)
        self._emulation = emulation
        ways = (self.traffic, self.patience.complete, self.patience.sleep_until, self._emulation)
        self._executor = Executor(self._comm, *ways)
        courier = Courier(self._comm, self.rank, *ways)
        here = tuple(self.board.ranks)
        self._plans = Plans(self.rank, self.size, self.network, self.allgather, here)
        self._payloads = Payloads(self._comm, courier, self._plans.rounds, self._gather_here)
        self._memory: SharedMemory | None = None
        self._computations = 0

    def allreduce(
        self, buffer: np.ndarray, algorithm: str = "mpi", what: str = "allreduce"
    ) -> None:
        r"""Sum the ranks' buffers in place, \(b_r \leftarrow \sum_s b_s\), to the same bits on all.

        Args:
            buffer: contiguous array, of the same dtype and length on every rank: float16,
                bfloat16, float32, float64 or an integer type.
            algorithm: a name of `labkit.schedules.ALLREDUCE`, executed as it is drawn; "mpi", the
                library's own choice (16-bit floats, which MPI cannot add, are summed in float32
                and rounded once); "shared_memory", for ranks of one host.
            what: name of the call in messages about waits.

        Raises:
            InvalidInput: the algorithm is not known, or cannot run on an emulated network.
            Mismatch: ranks differ in algorithm, dtype or length.
            RankFailed, WaitTooLong: see the class.
        """
        self._allreduce(buffer, algorithm, what)

    def pace(self, paced: bool = True) -> None:
        """Hand each message of a schedule over only when its emulated links are free, or not."""
        if self._emulation:
            self._emulation.paced = paced

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks share memory."""
        return len(self.board.ranks) == self.size

    def _allreduce(
        self,
        buffer: np.ndarray,
        algorithm: str,
        what: str,
        weight: float | None = None,
        aside: Aside | None = None,
    ) -> None:
        check_algorithm(algorithm)
        if self.size == 1:
            return
        flat = buffer.reshape(-1)
        if not buffer.flags.c_contiguous:
            raise InvalidInput("allreduce works in place: give a contiguous array")
        place = f"{what} ({algorithm} of {flat.dtype.name}[{flat.size}])"
        tag, steps = self._plans.get(algorithm, flat)
        with self._metered(place, flat.nbytes, algorithm):
            if algorithm == "mpi":
                # All meet first, polling, where a missing rank is noticed; behind that everyone is
                # there, and MPI's blocking collective runs at full speed.
                self._gather_here()
                library_allreduce(self._comm, flat, self.traffic)
            elif algorithm == "shared_memory":
                self.patience.begin()
                self.traffic.wait_seconds += self._shared_memory().allreduce(flat, weight, aside)
            else:
                self._executor.run(steps, flat, tag)

    @contextmanager
    def _metered(self, place: str, nbytes: int, algorithm: str) -> Iterator[None]:
        """A collective over data: named, counted, timed without its waits."""
        check_algorithm(algorithm)
        refuse_unmetered(algorithm, self.network)
        self.patience.enter(place)
        self.traffic.payload_bytes += nbytes
        before, start = self.traffic.wait_seconds, self.clock.now()
        yield
        self.board.enter(f"work after {place}")
        waited = self.traffic.wait_seconds - before
        self.traffic.transfer_seconds += self.clock.now() - start - waited

    def mean(
        self,
        buffer: np.ndarray,
        weight: float,
        algorithm: str = "mpi",
        what: str = "the mean",
        total: float | None = None,
        aside: Aside | None = None,
    ) -> None:
        r"""Replace the ranks' buffers by their mean \(b_r \leftarrow \sum_s w_s b_s / \sum_s w_s\).

        Weights travel beside the buffers, outside the traffic and any emulated network.

        Args:
            buffer, algorithm, what: as for `allreduce`.
            weight: of this rank, 0 or more; where all are 0 the mean is 0.
            total: the sum of the weights, where it is known already.
            aside: what of them lies elsewhere; only for "shared_memory".
        """
        if algorithm == "shared_memory" and self.size > 1:
            self._allreduce(buffer, algorithm, what, weight, aside)
            return
        if total is None:
            total = self.total(weight, what)
        buffer *= buffer.dtype.type(weight / total if total else 0.0)
        self.allreduce(buffer, algorithm, what)

    def gather_bytes(
        self, data: np.ndarray, algorithm: str = "mpi", what: str = "gather_bytes"
    ) -> list[np.ndarray]:
        """The bytes of every rank, in rank order; ranks may hold different numbers of them.

        Args:
            data: uint8, of one dimension.
            algorithm: as for `allreduce`: its messages carry sets of what is known so far, the
                ring's second half alone; "mpi" and "shared_memory": the library's allgather.
        """
        with self._metered(f"{what} ({algorithm})", data.nbytes, algorithm):
            return self._payloads.gather(data, algorithm)

    def sparse_sum(
        self,
        indices: np.ndarray,
        values: np.ndarray,
        length: int,
        algorithm: str = "mpi",
        what: str = "sparse_sum",
    ) -> np.ndarray:
        """The sum of the ranks' sparse vectors, dense (length,), to the same bits on all.

        Args:
            indices: int32 (k,), ascending, each once; ranks may hold different numbers of them.
            values: (k,).
            length: of the vectors, the same on all ranks.
            algorithm: as for `allreduce`; parts turn dense on their way where that is cheaper.
        """
        nbytes = indices.nbytes + values.nbytes
        with self._metered(f"{what} ({algorithm})", nbytes, algorithm):
            return self._payloads.sparse_sum(indices, values, length, algorithm)

    def own_part(self, length: int) -> slice:
        """The elements of a buffer that this rank adds up with "shared_memory"."""
        return self._shared_memory().own_part(length)

    def total(self, weight: float, what: str = "the mean") -> float:
        """The sum of the ranks' weights, outside the traffic and any emulated network."""
        from mpi4py import MPI

        if self.size == 1:
            return weight
        self.patience.enter(f"the weights of {what}")
        total = np.array([weight])
        self._gather_here([self._comm.Iallreduce(MPI.IN_PLACE, total, MPI.SUM)])
        return float(total[0])

    def allocate(self, length: int, dtype: Any = np.float32, common: bool = False) -> np.ndarray:
        """A buffer aligned to cache lines, zero at first (collective).

        Where all ranks are on one host it lies in shared memory, where "shared_memory" reduces it
        without copies. Common: one for all ranks, as `Aside` wants it.
        """
        if not self.on_one_host:
            whole = np.zeros(length * np.dtype(dtype).itemsize + 64, np.uint8)
            offset = -whole.ctypes.data % 64
            return whole[offset : len(whole) - 64 + offset].view(dtype)
        self.meet("the allocation of shared memory")
        nbytes = length * np.dtype(dtype).itemsize
        return self._shared_memory().allocate(nbytes, common).view(dtype)

    def broadcast(self, buffer: np.ndarray, root: int = 0, what: str = "broadcast") -> None:
        """Copy the root's buffer into everyone's, in place."""
        if self.size == 1:
            return
        self.meet(what)
        start = self.clock.now()
        self._comm.Bcast(buffer.view(np.uint8) if buffer.ndim else buffer, root)
        sent = buffer.nbytes if self.rank == root else 0
        self.traffic.messages += 1
        self.traffic.payload_bytes += sent
        self.traffic.wire_bytes += sent
        self.traffic.transfer_seconds += self.clock.now() - start

    def share(self, value: Any, root: int = 0, what: str = "share") -> Any:
        """The root's Python object, on every rank (pickled)."""
        self.meet(what)
        return self._comm.bcast(value, root)

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        """Every rank's Python object, in rank order (pickled)."""
        self.meet(what)
        return list(self._comm.allgather(value))

    def tally(self, values: np.ndarray, what: str = "tally") -> np.ndarray:
        """The sum of small arrays for bookkeeping, outside traffic and emulated network."""
        return np.asarray(np.sum(self.allgather(values, what), axis=0))

    def scatter(self, parts: Sequence[Any] | None, root: int = 0, what: str = "scatter") -> Any:
        """The part that the root holds for this rank; `parts` counts at the root only."""
        self.meet(what)
        return self._comm.scatter(parts, root)

    def split(self, colour: int, key: int | None = None) -> Communicator:
        """The Communicator of the ranks with the same colour, ordered by key (default: rank).

        What it sends is metered here too, and waits for the same links of an emulated network.
        """
        from mpi4py import MPI

        self.meet("split")
        part = self._comm.Split(colour, self.rank if key is None else key)
        assert isinstance(part, MPI.Intracomm)  # as all parts of one are
        network, emulation = self.network, self._emulation
        if network is not None and emulation is not None:
            ranks = part.allgather(self.rank)
            network, emulation = network.part(ranks, self.size), emulation.part(ranks)
        given = (self.patience.limit, network, self.traffic, emulation, self.patience, self.clock)
        found = Communicator(part, *given)
        part.Free()  # it works on a duplicate
        return found

    def send(self, data: np.ndarray, destination: int, tag: int = 0) -> None:
        """Send a contiguous array; back when it may be changed again."""
        self.finish(self.post(data, destination, tag), f"send to rank {destination}")

    def post(self, data: np.ndarray, destination: int, tag: int = 0) -> list[MPI.Request]:
        """Begin to send a contiguous array, which must stay as it is until `finish`."""
        requests = []
        if self._emulation:
            first_byte = np.array([self._emulation.depart(destination, data.nbytes)])
            requests.append(self._comm.Isend(first_byte, destination, _USER_TAG + tag))
        requests.append(self._comm.Isend(_bytes(data), destination, _USER_TAG + tag))
        self.traffic.messages += 1
        self.traffic.payload_bytes += data.nbytes
        self.traffic.wire_bytes += data.nbytes
        return requests

    def finish(self, posted: list[MPI.Request], what: str = "the end of a message") -> None:
        """Wait until what was posted is on its way."""
        self.patience.enter(what, collective=False)
        self.patience.complete(posted)

    def recv(self, data: np.ndarray, source: int, tag: int = 0) -> None:
        """Receive into a contiguous array; back when the message is delivered."""
        self.patience.enter(f"recv from rank {source}", collective=False)
        header, requests = np.zeros(1), []
        if self._emulation:
            requests.append(self._comm.Irecv(header, source, _USER_TAG + tag))
        requests.append(self._comm.Irecv(_bytes(data), source, _USER_TAG + tag))
        self.patience.complete(requests)
        if self._emulation:
            start = self.clock.now()
            arrival = self._emulation.arrive([(float(header[0]), source, data.nbytes)])
            self.patience.sleep_until(arrival)
            self.traffic.transfer_seconds += self.clock.now() - start

    def window(self, nbytes: int) -> Window:
        """Memory of this rank that others read and write without its help (collective)."""
        self.meet("the making of a window")
        return Window(self._comm, nbytes, self.traffic, self.clock, self._emulation)

    def act_slow(self, computed: float) -> None:
        """Sleep as long as this rank's computation would take longer, were it the emulated one.

        Args:
            computed: seconds that the computation really took.
        """
        if self.network is not None and self.rank in self.network.slow:
            factor = self.network.compute_factor(self.rank, self._computations)
            self._computations += 1
            self.clock.sleep((factor - 1) * computed)

    def meet(self, what: str = "barrier") -> None:
        """Wait until every rank has come to this call.

        Raises:
            RankFailed: a rank of this host said that it failed.
            WaitTooLong: someone did not come within the limit.
            Mismatch: another rank has come to another call.
        """
        if self.size == 1:
            return
        self.patience.enter(what)
        self._gather_here()
        self.board.enter(f"work after {what}")

    def leave(self) -> None:
        """Say that this rank comes to no further call; who waits for it is told so."""
        self.board.enter("the end of its program", waiting=True)

    def close(self) -> None:
        """Free what MPI holds for this Communicator (collective)."""
        self.meet("the end of the call")
        for own in (self._memory, self._emulation):
            if own is not None:
                own.close()
        self.board.close()
        self._comm.Free()

    def _shared_memory(self) -> SharedMemory:
        if self._memory is None:
            if not self.on_one_host:
                raise InvalidInput("shared_memory wants all ranks on one host; use 'hierarchical'")
            self._memory = SharedMemory(self._comm, self.clock, self.patience.pause)
        return self._memory

    def _gather_here(self, others: Sequence[MPI.Request] = ()) -> None:
        """A barrier in which ranks tell each other which call they are in.

        Args:
            others: requests of the same call, to be completed with it.
        """
        from mpi4py import MPI

        code = zlib.crc32(self.patience.place.encode())
        told, most = np.array([code, -code]), np.zeros(2, np.int64)
        self.patience.complete([self._comm.Iallreduce(told, most, MPI.MAX), *others])
        if most[0] != -most[1]:
            self.patience.trouble = Mismatch(
                f"ranks wait for each other in different calls: rank {self.rank} waits in "
                f"{self.patience.place}; {self.board.elsewhere(self.patience.place)}"
            )
            raise self.patience.trouble
        self.patience.look_around()  # who failed after coming here goes no further with us


def _bytes(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1).view(np.uint8)
