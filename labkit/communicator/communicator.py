"""Communicator over MPI: what ranks say to each other, metered, and never a silent wait."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.timeouts import Limits
from labkit.communicator.clock import WALL, Clock
from labkit.communicator.eager import Slots
from labkit.communicator.emulation import Emulation
from labkit.communicator.fault_injector import FaultSlowdown, Injector
from labkit.communicator.mailbox import Mailbox, Route
from labkit.communicator.membership import SPARE, Membership
from labkit.communicator.messages import Messages
from labkit.communicator.numbers import check_summable, scale
from labkit.communicator.payloads import Payloads
from labkit.communicator.reductions import Reductions
from labkit.communicator.rendezvous import Parcels
from labkit.communicator.shared_memory import Aside, SharedMemory
from labkit.communicator.slowness import Slowness
from labkit.communicator.status_board import StatusBoard, leave_without_it
from labkit.communicator.traffic import Traffic
from labkit.communicator.ulfm import all_are, outlives
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.window import Window
from labkit.communicator.wire import Rules
from labkit.network import Network, Slowdown

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT = 600.0  # seconds; the first step of a large model is traced for minutes


class Communicator:
    """The ranks of one experiment, as this rank sees them.

    No wait is silent: a rank that has failed, one that does not come within `limit` seconds, and
    ranks that wait for each other in different calls, and a host that is not heard any more, are
    noticed by those that wait, and named with the call they are in.

    Args:
        comm: an mpi4py communicator; the Communicator works on a duplicate of it.
        limit: seconds after which a wait raises `WaitTooLong`.
        network: a network to emulate for schedules, `send`, `recv` and windows, on one host; None:
            the real one.
        traffic: a meter to go on with; None: a new one.
        emulation: of a network, to go on with in place of `network`; None: a new one.
        outer: the patience of the ranks of which these are a part.
        clock: by which ranks wait and take times; the same for all of a host.
        rules: what holds for messages that labkit sends itself, to go on with; None: nothing.
        crew: the ranks and their spares; None: there are none.

    Attributes:
        rank, size: this rank's number, and how many there are.
        numbers: of these ranks before any was gone; `number` is this one's.
        dead: the numbers of those that are gone, and have not been replaced.
        lost: who is gone, by rank among all that were called.
        deaths: ranks that were gone before these were called, where a call is sent again.
        slowness: how much longer this rank computes than it could; None: not at all.
        on_one_host: whether all ranks share memory.
        traffic: what this rank has sent and how long it took.
        rules: what holds for messages that labkit sends itself: checksums, faults.
        patience: how this rank waits. It remembers the first error that a wait has raised, which
            TensorFlow hides in one of its own. It is polite where this process computes while it
            waits: a loop would take its core, and hold the interpreter's lock for milliseconds.
        meet: waits until all ranks have come, see `WaitPolicy`.
        send, recv, post, finish: messages from rank to rank, see `Messages`.
        gather_bytes, sparse_sum, sum_rows: of values of unequal size, see `Payloads`.
        in_rounds: as `allreduce` by a schedule, and what was there after each round.
        own_part: the elements of a buffer that this rank adds up with "shared_memory".
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        limit: float = LIMIT,
        network: str | Network | None = None,
        traffic: Traffic | None = None,
        emulation: Emulation | None = None,
        outer: WaitPolicy | None = None,
        clock: Clock = WALL,
        rules: Rules | None = None,
        crew: Membership | None = None,
    ) -> None:
        self.network = emulation.network if emulation else Network.parse(network)
        self.traffic, self.clock = traffic or Traffic(), clock
        self.crew, self._whole = crew, self.network
        self.numbers = list(range(comm.size)) if crew is None else crew.working_numbers
        self.dead, self.lost = list[int](), [] if crew is None else crew.lost
        self.deaths = 0
        self.slowness: Slowness | None = None
        self.rules = rules or Rules()
        self._begin(comm.Dup(), limit, emulation, outer)

    def _begin(
        self,
        comm: MPI.Intracomm,
        limit: float,
        emulation: Emulation | None,
        outer: WaitPolicy | None,
    ) -> None:
        self._comm, clock = comm, self.clock
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.board = StatusBoard(self._comm, clock, Limits.of(limit), self.numbers)
        self.local_rank: int = self.board.local_rank  # among the ranks of this host
        patience = WaitPolicy(self._comm, self.board, self.traffic, clock, limit, outer)
        self.patience, self.meet, self.on_one_host = patience, patience.meet, patience.on_one_host
        if self.network and emulation is None:
            self._refuse_hosts()
            emulation = Emulation(self._comm, self.network, clock)
        self._emulation = emulation
        if outer is None and self.network is not None:
            self.be_slow(self.network.slow, self.network.seed)
        messages = Messages(patience, emulation, self.rules)
        self.send, self.recv = messages.send, messages.recv
        self.post, self.finish = messages.post, messages.finish
        self._memory = SharedMemory(patience.inside_host())
        self.own_part = self._memory.own_part
        given = patience, emulation, self._memory, self.allgather, self.rules
        self._reductions = Reductions(*given)
        self.in_rounds = self._reductions.in_rounds
        payloads = Payloads(patience, emulation, self._reductions)
        self.gather_bytes = payloads.gather_bytes
        self.sparse_sum, self.sum_rows = payloads.sparse_sum, payloads.sum_rows

    def allreduce(
        self, buffer: np.ndarray, algorithm: str = "mpi", what: str = "allreduce"
    ) -> None:
        r"""Sum the ranks' buffers in place, \(b_r \leftarrow \sum_s b_s\), to the same bits on all.

        Args:
            buffer: contiguous array, of the same dtype and length on every rank: float16,
                bfloat16, float32, float64 or an integer type.
            algorithm: a name of `labkit.schedules.ALLREDUCE`, executed as it is drawn; "mpi", the
                library's own choice (16-bit floats, which MPI cannot add, are summed in float32
                and rounded once); "shared_memory", for ranks of one host. "two_level" and its
                like add up in shared memory inside each of several real hosts.
            what: name of the call in messages about waits.

        Raises:
            InvalidInput: the algorithm is not known, or cannot run on an emulated network; values
                that cannot be added, such as bool.
            Mismatch: ranks differ in algorithm, dtype or length, or in what the call is for.
            RankFailed, WaitTooLong: see the class.
        """
        self._reductions.allreduce(buffer, algorithm, what)

    @property
    def outlives(self) -> bool:
        """Whether these ranks were started so that they may outlive the death of some."""
        return outlives()

    @property
    def number(self) -> int:
        """Of this rank, before any was gone."""
        return self.numbers[self.rank]

    @property
    def member(self) -> int:
        """This rank among all that were called, spares too."""
        return self.number if self.crew is None else self.crew.member(self.number)

    def shrink(self, settle: Callable[[], None] = lambda: None) -> list[int]:
        """Go on as the ranks that live, in their order (collective of these), after `RankDied`.

        Waits of all others raise `RankDied` too, wherever they are. What was made with the ranks
        before (windows, parts, memory from `allocate`) is abandoned: without the dead it cannot be
        freed. All ranks agree that the new ones have come about; who dies meanwhile is left out.

        Args:
            settle: called when nothing waits for the dead any more, before anything is made anew:
                other threads of this rank must have ended what they did here.

        Returns:
            the numbers of those that are gone.
        """
        from mpi4py import MPI

        broken, limit, before = self._comm, self.patience.limit, self.numbers
        broken.Revoke()
        settle()
        self.board.abandon()
        network = self.network
        atexit.register(leave_without_it)
        for _ in before:  # each time another one has died meanwhile
            whole = broken.Shrink()
            assert isinstance(whole, MPI.Intracomm)  # as what shrinks is one
            places = MPI.Group.Translate_ranks(whole.group, None, broken.group)
            self.numbers = [before[place] for place in places]
            self.network = network and network.part(places, broken.size)
            try:
                self._begin(whole, limit, None, None)
                fine = True
            except Exception:  # also of what one that died meanwhile has left half said
                whole.Revoke()
                fine = False
            if all_are(whole, fine):
                found = [number for number in before if number not in self.numbers]
                self.dead += found
                self.lost += found if self.crew is None else map(self.crew.member, found)
                return found
            self.board.abandon()
        raise LabkitError("those that live find no way to go on together")

    @property
    def spares(self) -> int:
        """How many wait to take the place of one that is gone, as far as is known."""
        return 0 if self.crew is None else self.crew.numbers.count(SPARE)

    def replace(self) -> list[int]:
        """Go on as all ranks again, after `shrink` (collective of those that live, and spares).

        Returns:
            the numbers of those whose places spares have taken: not all, where spares are few.
        """
        assert self.crew is not None
        crew, before, limit = self.crew, self.numbers, self.patience.limit
        self.board.abandon()

        def begin(comm: MPI.Intracomm) -> None:
            self.numbers = crew.working_numbers
            self.network = self._whole and self._whole.part(self.numbers, crew.size)
            self._begin(comm.Dup(), limit, None, None)

        crew.fill(begin, lambda: self.board.abandon())
        self.dead = [number for number in self.dead if number not in self.numbers]
        self.lost = crew.lost
        return [number for number in self.numbers if number not in before]

    def pace(self, paced: bool = True) -> None:
        """Hand each message of a schedule over only when its emulated links are free, or not."""
        if self._emulation:
            self._emulation.paced = paced

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

        Weights travel beside the buffers, outside the traffic and any emulated network. Values are
        weighted before they are added, so that no sum is larger than the largest of them.

        Args:
            buffer, algorithm, what: as for `allreduce`; of floats.
            weight: of this rank, 0 or more; where all are 0 the mean is 0.
            total: the sum of the weights, where it is known already.
            aside: what of them lies elsewhere; only for "shared_memory".
        """
        # In shared memory the weights lie beside the flags: no call for their sum, no scaled copy.
        if algorithm == "shared_memory" and self.size > 1:
            self._reductions.allreduce(buffer, algorithm, what, weight, aside)
            return
        check_summable(buffer.dtype, mean=True)
        if total is None:
            total = self.total(weight, what)
        share = weight / total if total else 0.0
        if self.size == 1:
            scale(buffer, share)
        self._reductions.allreduce(buffer, algorithm, what, share)

    def total(self, weight: float, what: str = "the mean") -> float:
        """The sum of the ranks' weights, outside the traffic and any emulated network."""
        return float(np.sum(self.everyone(weight, f"the weights of {what}")))

    def everyone(self, value: float, what: str) -> np.ndarray:
        """Every rank's number, in rank order, outside the traffic and any emulated network."""
        if self.size == 1:
            return np.array([value])
        self.patience.enter(what)
        return self.patience.gather_here(value)

    def allocate(self, length: int, dtype: Any = np.float32, common: bool = False) -> np.ndarray:
        """A buffer aligned to cache lines, zero at first (collective).

        It lies in memory that the ranks of a host share, where "shared_memory" and "two_level"
        reduce it without copies. Common: one for all of them, as `Aside` wants it.
        """
        kind = "common " if common else ""
        self.meet(f"the allocation of {kind}shared memory, {np.dtype(dtype).name}[{length}]")
        nbytes = length * np.dtype(dtype).itemsize
        with self.patience.minding:
            return self._memory.allocate(nbytes, common).view(dtype)

    def broadcast(self, buffer: np.ndarray, root: int = 0, what: str = "broadcast") -> None:
        """Copy the root's buffer into everyone's, in place."""
        if self.size == 1:
            return
        self.meet(f"{what} (broadcast of {_named(buffer)} from rank {root})")
        start = self.clock.now()
        self.patience.call("Bcast", buffer.view(np.uint8) if buffer.ndim else buffer, root)
        sent = buffer.nbytes if self.rank == root else 0
        self.traffic.payload_bytes += sent
        self.patience.count(sent, sent)
        self.traffic.transfer_seconds += self.clock.now() - start

    def share(self, value: Any, root: int = 0, what: str = "share") -> Any:
        """The root's Python object, on every rank (pickled)."""
        self.patience.enter(f"{what} (share from rank {root})")
        return self.patience.share(value, root)

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        """Every rank's Python object, in rank order (pickled)."""
        self.patience.enter(f"{what} (allgather)")
        return self.patience.gather(value)

    def tally(self, values: np.ndarray, what: str = "tally") -> np.ndarray:
        """The sum of small arrays for bookkeeping, outside traffic and emulated network."""
        self.patience.enter(f"{what} (tally of {_named(values)})")
        return np.asarray(np.sum(self.patience.gather(values), axis=0))

    def scatter(self, parts: Sequence[Any] | None, root: int = 0, what: str = "scatter") -> Any:
        """The part that the root holds for this rank; `parts` counts at the root only.

        Raises:
            InvalidInput: the root has not as many parts as there are ranks.
        """
        if self.rank == root and (parts is None or len(parts) != self.size):
            given = "None" if parts is None else f"{len(parts)}"
            raise InvalidInput(f"scatter of {given} parts: give one for each of {self.size} ranks")
        self.meet(f"{what} (scatter from rank {root})")
        with self.patience.minding:
            return self._comm.scatter(parts, root)

    def split(self, colour: int, key: int | None = None) -> Communicator:
        """The Communicator of the ranks with the same colour, ordered by key (default: rank).

        What it sends is metered here too, and waits for the same links of an emulated network.
        """
        from mpi4py import MPI

        self.meet("split")
        with self.patience.minding:
            part = self._comm.Split(colour, self.rank if key is None else key)
            assert isinstance(part, MPI.Intracomm)  # as all parts of one are
            emulation = self._emulation and self._emulation.part(part.allgather(self.rank))
            given = (self.patience.limit, None, self.traffic, emulation, self.patience, self.clock)
            communicator = Communicator(part, *given, self.rules)
        communicator.slowness = self.slowness
        part.Free()  # it works on a duplicate
        return communicator

    def over(self, network: str | Network | None) -> Communicator:
        """The same ranks on another network; what it sends is metered by itself (collective)."""
        self.meet("the way to another network")
        limit = self.patience.limit
        with self.patience.minding:
            return Communicator(self._comm, limit, network, outer=self.patience, clock=self.clock)

    def window(self, nbytes: int) -> Window:
        """Memory of this rank that others read and write without its help (collective)."""
        self.meet("the making of a window")
        with self.patience.minding:
            return Window(nbytes, self.patience, self._emulation)

    def mailbox(self, hosts: Sequence[int] | None = None) -> Mailbox:
        """Messages from whoever sends; one mailbox at a time, for all have the same tags.

        Args:
            hosts: the rank of each who sends or reads, by number; None: ranks themselves do.
        """
        return Mailbox(self.patience, self._emulation, hosts or range(self.size), self.rules)

    def slots(self, routes: Mapping[Route, int], hosts: Sequence[int] | None = None) -> Slots:
        """The same, written straight into the memory of who reads them (collective).

        Args:
            routes: bytes of the longest values, by the numbers of who sends and who reads.
            hosts: as for `mailbox`.
        """
        given = self.window, self.patience, self._emulation
        return Slots(*given, hosts or range(self.size), routes)

    def parcels(self, routes: Mapping[Route, int], hosts: Sequence[int] | None = None) -> Parcels:
        """The same for values of any length, which who reads them fetches (collective).

        Args:
            routes: bytes that are expected, by the numbers of who sends and who reads.
            hosts: as for `mailbox`.
        """
        given = self.window, self.patience, self._emulation
        return Parcels(*given, hosts or range(self.size), routes)

    def be_slow(self, slow: Mapping[int, Slowdown], seed: int) -> None:
        """From now on compute as slowly as the ranks that are named here; others as they can."""
        slowdown = slow.get(self.rank)
        self.slowness = (
            None if slowdown is None else Slowness(slowdown, self.rank, seed, self.clock)
        )

    def plant(self, injector: Injector) -> None:
        """From now on let faults happen to this rank, to what it sends and how it computes."""
        self.rules.injector = injector
        self.slowness = FaultSlowdown(injector, self.slowness, self.clock)

    def act_slow(self, computed: float) -> None:
        """Sleep as long as this rank's computation would take longer, were it the emulated one.

        Args:
            computed: seconds that the computation really took.
        """
        if self.slowness is not None:
            self.slowness.act(computed)

    def _refuse_hosts(self) -> None:
        if not self.on_one_host:
            self.board.close()
            self._comm.Free()
            raise InvalidInput(
                f"network={self.network} is emulated among ranks of one host, but these have "
                "several, joined by a real network; run it without network, or on one host"
            )

    def dismiss(self) -> None:
        """Tell the spares that nobody needs them any more."""
        if self.crew is not None:
            self.crew.dismiss()

    def leave(self) -> None:
        """Say that this rank comes to no further call; who waits for it is told so."""
        self.board.enter("the end of its program", waiting=True)

    def close(self) -> None:
        """Free what MPI holds for this Communicator (collective)."""
        self.meet("the end of the call")
        with self.patience.minding:
            self._memory.close()
            if self._memory.patience is not self.patience:
                self._memory.patience.comm.Free()
            if self._emulation:
                self._emulation.close()
            self.board.close()
            self._comm.Free()


def _named(values: np.ndarray) -> str:
    return f"{values.dtype.name}{list(values.shape)}"
