"""The Communicator: collectives and messages over MPI, with a traffic meter and timeouts."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.renamed import refuse_former_attributes
from labkit.common.timeouts import Limits
from labkit.communicator.clock import WALL, Clock
from labkit.communicator.emulation import Emulation
from labkit.communicator.fault_injector import FaultSlowdown, Injector, Slowness
from labkit.communicator.mailbox import Mailbox, Route
from labkit.communicator.membership import SPARE, Membership, agree_all, outlives
from labkit.communicator.one_sided import EagerMailbox, RendezvousMailbox, Window
from labkit.communicator.payloads import Payloads
from labkit.communicator.reductions import Reductions
from labkit.communicator.shared_memory import SeparateBuffers, SharedMemory
from labkit.communicator.status_board import StatusBoard, exit_without_finalize
from labkit.communicator.wait_policy import Traffic, WaitPolicy
from labkit.communicator.wire import MessageRules, Messages, scale, validate_summable
from labkit.network import Network, Slowdown

if TYPE_CHECKING:
    from mpi4py import MPI

# The default timeout of a wait is 600 s (LIMIT). TensorFlow needs minutes to trace the first step
# of a large model.
LIMIT = 600.0


@refuse_former_attributes
class Communicator:
    """The group of ranks of one experiment; each rank has its own Communicator object.

    Every wait for other ranks is supervised. A waiting rank detects failed ranks, silent hosts,
    timeouts, and deadlocks of ranks that wait in different calls. If a wait fails, the error
    message names the failed or missing ranks and their calls.

    Args:
        comm: An mpi4py communicator; the Communicator uses only a duplicate of it.
        timeout: Seconds after which a wait raises `WaitTooLong`; default: 600.
        network: The network to emulate if all ranks are on one host. Schedules, `send`, `recv` and
            windows use the emulated network. If `network` is None, labkit starts no emulation.
        traffic: An existing traffic meter that continues to count; None: a new meter.
        emulation: A running network emulation that replaces `network`; None: start a new emulation
            if `network` is given.
        outer: The wait policy of the larger Communicator that was split. If `outer` is None, there
            is no larger Communicator.
        clock: The clock for waits and time stamps, the same on all ranks of a host.
        rules: Checksum and fault-injection rules for messages that labkit itself sends; None: no
            rules.
        membership: The working ranks and the spare ranks of the cluster's current call. If
            `membership` is None, there are no spare ranks.

    Attributes:
        rank, size: The rank number of this process, and the number of ranks.
        numbers: For each current rank, the rank number that it had before any rank died. The
            property `number` is the entry of `numbers` for this rank.
        dead: The dead ranks that no spare rank has replaced. Numbers in `dead` are the rank numbers
            from before the first death.
        lost: All dead ranks, including spare ranks, by their numbers in the cluster's current call.
        deaths: The number of ranks that died in earlier attempts of the cluster's current call.
        restarts: How often `restart` has rebuilt this communicator.
        slowness: The artificial slowdown of this rank's computation; None: this rank is not slowed
            down.
        on_one_host: Whether all ranks run on one host and share memory.
        traffic: The meter that counts the bytes, messages and seconds of this rank.
        rules: Checksum and fault-injection rules for messages that labkit itself sends.
        wait_policy: The wait policy of this rank. The wait policy stores the first error of a wait,
            because TensorFlow hides this error inside another error. A polite wait policy sleeps
            between polls. A spin loop would occupy the core and hold Python's global interpreter
            lock for milliseconds.
        barrier: Method that waits until every rank has reached this call, see `WaitPolicy.barrier`.
        send, recv, post, finish: Methods for point-to-point messages, see `Messages`.
        gather_bytes, sparse_sum, sum_rows: Methods for collectives over values whose sizes differ
            between ranks, see `Payloads`.
        allreduce_in_rounds: Method that runs an `allreduce` according to a schedule. The method
            `allreduce_in_rounds` returns a copy of the buffer after each round.
        local_part: Method that returns the elements of a buffer that this rank sums in the
            algorithm "shared_memory".
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        timeout: float = LIMIT,
        network: str | Network | None = None,
        traffic: Traffic | None = None,
        emulation: Emulation | None = None,
        outer: WaitPolicy | None = None,
        clock: Clock = WALL,
        rules: MessageRules | None = None,
        membership: Membership | None = None,
    ) -> None:
        self.network = emulation.network if emulation else Network.parse(network)
        self.traffic, self.clock = traffic or Traffic(), clock
        self.membership, self._full_network = membership, self.network
        self.numbers = list(range(comm.size)) if membership is None else membership.working_numbers
        self.dead, self.lost = list[int](), [] if membership is None else membership.dead_ranks
        self.deaths = 0
        self.restarts = 0
        self.slowness: Slowness | None = None
        self.rules = rules or MessageRules()
        self._initialize(comm.Dup(), timeout, emulation, outer)

    def _initialize(
        self,
        comm: MPI.Intracomm,
        timeout: float,
        emulation: Emulation | None,
        outer: WaitPolicy | None,
    ) -> None:
        self._comm, clock = comm, self.clock
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        self.board = StatusBoard(self._comm, clock, Limits.of(timeout), self.numbers)
        # `local_rank` is the number of this rank among the ranks of its host.
        self.local_rank: int = self.board.local_rank
        wait_policy = WaitPolicy(self._comm, self.board, self.traffic, clock, timeout, outer)
        self.wait_policy, self.barrier, self.on_one_host = (
            wait_policy,
            wait_policy.barrier,
            wait_policy.on_one_host,
        )
        if self.network and emulation is None:
            self._refuse_hosts()
            emulation = Emulation(self._comm, self.network, clock)
        self._emulation = emulation
        if outer is None and self.network is not None:
            self.set_slowdown(self.network.stragglers, self.network.seed)
        messages = Messages(wait_policy, emulation, self.rules)
        self.send, self.recv = messages.send, messages.recv
        self.post, self.finish = messages.post, messages.finish
        self._memory = SharedMemory(wait_policy.host_policy())
        self.local_part = self._memory.local_part
        arguments = wait_policy, emulation, self._memory, self.allgather, self.rules
        self._reductions = Reductions(*arguments)
        self.allreduce_in_rounds = self._reductions.allreduce_in_rounds
        payloads = Payloads(wait_policy, emulation, self._reductions)
        self.gather_bytes = payloads.gather_bytes
        self.sparse_sum, self.sum_rows = payloads.sparse_sum, payloads.sum_rows

    def allreduce(
        self, buffer: np.ndarray, algorithm: str = "mpi", label: str = "allreduce"
    ) -> None:
        r"""Sum all buffers in place, \(b_r \leftarrow \sum_s b_s\); all sums are bitwise equal.

        Args:
            buffer: A contiguous array with the same dtype and length on every rank. The dtype is
                float16, bfloat16, float32, float64 or an integer type.
            algorithm: A schedule's name in `labkit.schedules.ALLREDUCE`, or "mpi", or
                "shared_memory". With "mpi", the MPI library chooses the allreduce algorithm. The
                algorithm "shared_memory" is for ranks on one host. With the algorithm "mpi", 16-bit
                floats are summed in float32 and rounded once. The MPI library itself cannot add
                16-bit floats. On several real hosts, two-level algorithms use shared memory for the
                sums inside each host.
            label: The name of the call in error messages.

        Raises:
            InvalidInput: The algorithm is unknown, or cannot run on an emulated network.
                `InvalidInput` is also raised if the algorithm cannot add the dtype, such as bool.
            Mismatch: The ranks' calls differ in name, algorithm, dtype or length.
            RankFailed, WaitTooLong: Another rank has failed, or has not arrived within the timeout.
        """
        self._reductions.allreduce(buffer, algorithm, label)

    @property
    def outlives(self) -> bool:
        """Whether MPI was started with ULFM, so that ranks survive the death of other ranks."""
        return outlives()

    @property
    def number(self) -> int:
        """The number that this rank had before any rank died."""
        return self.numbers[self.rank]

    @property
    def member(self) -> int:
        """The number of this rank among all working and spare ranks of the cluster's call."""
        return self.number if self.membership is None else self.membership.member(self.number)

    def shrink(self, settle: Callable[[], None] = lambda: None) -> list[int]:
        """Remove dead ranks from this communicator after `RankDied` (collective over survivors).

        The surviving ranks remain in the same order. Ranks that still wait in other calls of this
        communicator also get the error `RankDied`. Windows, split communicators and memory from
        `allocate` become unusable. MPI cannot free memory and communicators without the dead ranks.
        All surviving ranks agree on the members of the new communicator. Ranks that die during the
        call of `shrink` are removed, too.

        Args:
            settle: A function that returns when no other thread of this rank uses this communicator
                any more. `shrink` calls `settle` after it has revoked the old communicator, and
                before it creates the new communicator.

        Returns:
            The removed ranks, by the rank numbers that they had before any rank died.
        """
        from mpi4py import MPI

        broken, limit, before = self._comm, self.wait_policy.timeout, self.numbers
        broken.Revoke()
        settle()
        self.board.abandon()
        network = self.network
        atexit.register(exit_without_finalize)
        for _ in before:  # Each death of a rank during `shrink` requires one more attempt.
            whole = broken.Shrink()
            # The assert tells the type checker that the new communicator is an Intracomm.
            assert isinstance(whole, MPI.Intracomm)
            old_ranks = MPI.Group.Translate_ranks(whole.group, None, broken.group)
            self.numbers = [before[rank] for rank in old_ranks]
            self.network = network and network.part(old_ranks, broken.size)
            try:
                self._initialize(whole, limit, None, None)
                succeeded = True
            # `except Exception` also catches errors from a message that a dying rank sent only in
            # part.
            except Exception:
                whole.Revoke()
                succeeded = False
            if agree_all(whole, succeeded):
                found = [number for number in before if number not in self.numbers]
                self.dead += found
                self.lost += (
                    found if self.membership is None else map(self.membership.member, found)
                )
                return found
            self.board.abandon()
        raise LabkitError(
            "the surviving ranks cannot form a new communicator after the death of a rank"
        )

    def restart(self, comm: MPI.Intracomm) -> None:
        """Rebuild this communicator after a call has failed on some ranks (collective).

        Windows, split communicators and memory from `allocate` are unusable after the restart, as
        after `shrink`.

        Args:
            comm: An mpi4py communicator of the same ranks without pending messages.
        """
        self.board.abandon()
        self._initialize(comm.Dup(), self.wait_policy.timeout, None, None)
        self.restarts += 1

    @property
    def spares(self) -> int:
        """The number of spare ranks that wait to replace a dead rank, as far as this rank knows."""
        return 0 if self.membership is None else self.membership.numbers.count(SPARE)

    def replace(self) -> list[int]:
        """Replace dead ranks by spare ranks after `shrink` (collective of survivors and spares).

        Returns:
            The rank numbers of the dead ranks that spare ranks have replaced. If there are too few
            spare ranks, some dead ranks are not replaced. The result contains only dead ranks that
            spare ranks have replaced.
        """
        assert self.membership is not None
        membership, before, limit = self.membership, self.numbers, self.wait_policy.timeout
        self.board.abandon()

        def begin(comm: MPI.Intracomm) -> None:
            self.numbers = membership.working_numbers
            self.network = self._full_network and self._full_network.part(
                self.numbers, membership.size
            )
            self._initialize(comm.Dup(), limit, None, None)

        membership.replace_dead(begin, lambda: self.board.abandon())
        self.dead = [number for number in self.dead if number not in self.numbers]
        self.lost = membership.dead_ranks
        return [number for number in self.numbers if number not in before]

    def pace(self, paced: bool = True) -> None:
        """Choose whether this rank delays messages of schedules while its emulated link is busy.

        Args:
            paced: If True, each message waits until the emulated link is free. If `paced` is False,
                each message is sent at once.
        """
        if self._emulation:
            self._emulation.paced = paced

    def mean(
        self,
        buffer: np.ndarray,
        weight: float,
        algorithm: str = "mpi",
        label: str = "the mean",
        total: float | None = None,
        separate: SeparateBuffers | None = None,
    ) -> None:
        r"""Replace the ranks' buffers by their mean \(b_r \leftarrow \sum_s w_s b_s / \sum_s w_s\).

        The traffic meter does not count the messages that exchange the weights. The emulated
        network does not delay the messages that exchange the weights. Before the sum, each rank
        multiplies its values by its share of the total weight. Partial sums cannot exceed the
        largest value, because the shares add up to at most 1.

        Args:
            buffer, algorithm, label: As in `allreduce`, but the buffer must have a float dtype.
            weight: The weight of this rank's values in the mean, at least 0. If the weights of all
                ranks are 0, the mean is 0.
            total: The sum of the weights of all ranks, if known. If the sum is unknown, the ranks
                send each other the weights.
            separate: Memory outside `buffer` for the inputs or the result; only for the algorithm
                "shared_memory".
        """
        # With the algorithm "shared_memory", each rank reads other ranks' weights directly. A mean
        # in shared memory needs no additional call and no scaled copy.
        if algorithm == "shared_memory" and self.size > 1:
            self._reductions.allreduce(buffer, algorithm, label, weight, separate)
            return
        validate_summable(buffer.dtype, mean=True)
        if total is None:
            total = self.total(weight, label)
        share = weight / total if total else 0.0
        if self.size == 1:
            scale(buffer, share)
        self._reductions.allreduce(buffer, algorithm, label, share)

    def total(self, weight: float, label: str = "the mean") -> float:
        """Return the sum of all ranks' weights; the traffic is neither metered nor emulated."""
        return float(np.sum(self.allgather_scalar(weight, f"the weights of {label}")))

    def allgather_scalar(self, value: float, label: str) -> np.ndarray:
        """Gather one number per rank in rank order; the traffic is neither metered nor emulated."""
        if self.size == 1:
            return np.array([value])
        self.wait_policy.name_call(label)
        return self.wait_policy.allgather_scalar(value)

    def allocate(self, length: int, dtype: Any = np.float32, common: bool = False) -> np.ndarray:
        """Allocate a zeroed buffer in shared memory, aligned to cache lines (collective).

        The algorithms "shared_memory" and "two_level" reduce a buffer from `allocate` without
        copies.

        Args:
            length: The number of elements of the shared buffer.
            dtype: The dtype of the elements; default: float32.
            common: Whether all ranks of a host share one buffer. The method `SeparateBuffers.into`
                works only with a shared buffer. By default, each rank has its own buffer.
        """
        kind = "common " if common else ""
        self.barrier(f"the allocation of {kind}shared memory, {np.dtype(dtype).name}[{length}]")
        nbytes = length * np.dtype(dtype).itemsize
        with self.wait_policy.failure_guard:
            return self._memory.allocate(nbytes, common).view(dtype)

    def broadcast(self, buffer: np.ndarray, root: int = 0, label: str = "broadcast") -> None:
        """Copy the buffer of the rank `root` into the buffers of all ranks, in place."""
        if self.size == 1:
            return
        self.barrier(f"{label} (broadcast of {_array_text(buffer)} from rank {root})")
        start = self.clock.now()
        self.wait_policy.call("Bcast", buffer.view(np.uint8) if buffer.ndim else buffer, root)
        sent = buffer.nbytes if self.rank == root else 0
        self.traffic.payload_bytes += sent
        self.wait_policy.count(sent, sent)
        self.traffic.transfer_seconds += self.clock.now() - start

    def broadcast_object(self, value: Any, root: int = 0, label: str = "share") -> Any:
        """Send a Python object (pickled) from the rank `root` to all ranks, and return it."""
        self.wait_policy.name_call(f"{label} (share from rank {root})")
        return self.wait_policy.share(value, root)

    def allgather(self, value: Any, label: str = "allgather") -> list[Any]:
        """Gather one Python object (pickled) from each rank, in rank order."""
        self.wait_policy.name_call(f"{label} (allgather)")
        return self.wait_policy.gather(value)

    def allreduce_small(self, values: np.ndarray, label: str = "tally") -> np.ndarray:
        """Sum small bookkeeping arrays of all ranks; the traffic is not metered or emulated."""
        self.wait_policy.name_call(f"{label} (tally of {_array_text(values)})")
        return np.asarray(np.sum(self.wait_policy.gather(values), axis=0))

    def scatter(self, parts: Sequence[Any] | None, root: int = 0, label: str = "scatter") -> Any:
        """Send one element of the root's `parts` to each rank; `parts` on other ranks is ignored.

        Raises:
            InvalidInput: At the root, the number of elements of `parts` differs from the number of
                ranks.
        """
        if self.rank == root and (parts is None or len(parts) != self.size):
            count = "None" if parts is None else f"{len(parts)}"
            raise InvalidInput(
                f"scatter received {count} parts; give one part for each of the {self.size} ranks"
            )
        self.barrier(f"{label} (scatter from rank {root})")
        with self.wait_policy.failure_guard:
            return self._comm.scatter(parts, root)

    def split(self, colour: int, key: int | None = None) -> Communicator:
        """Return the Communicator of all ranks that pass the same `colour` (collective).

        The new Communicator shares the traffic meter and the emulated links of the old
        Communicator.

        Args:
            colour: The number of the group that this rank joins; "colour" is MPI's term.
            key: A number that determines the order of the ranks in a group. The default key is the
                rank in this Communicator.
        """
        from mpi4py import MPI

        self.barrier("split")
        with self.wait_policy.failure_guard:
            part = self._comm.Split(colour, self.rank if key is None else key)
            # The assert tells the type checker that the new communicator is an Intracomm.
            assert isinstance(part, MPI.Intracomm)
            emulation = self._emulation and self._emulation.part(part.allgather(self.rank))
            arguments = (
                self.wait_policy.timeout,
                None,
                self.traffic,
                emulation,
                self.wait_policy,
                self.clock,
            )
            communicator = Communicator(part, *arguments, self.rules)
        communicator.slowness = self.slowness
        # The new Communicator uses a duplicate of the MPI communicator `part`, so `part` can be
        # freed.
        part.Free()
        return communicator

    def with_network(self, network: str | Network | None) -> Communicator:
        """Return a Communicator of the same ranks that emulates another network (collective).

        The new Communicator has its own traffic meter, which starts at 0.
        """
        self.barrier("the barrier before the change to another network")
        limit = self.wait_policy.timeout
        with self.wait_policy.failure_guard:
            return Communicator(
                self._comm, limit, network, outer=self.wait_policy, clock=self.clock
            )

    def window(self, nbytes: int) -> Window:
        """Allocate memory on this rank for one-sided access by other ranks (collective)."""
        self.barrier("the barrier before the allocation of an MPI window")
        with self.wait_policy.failure_guard:
            return Window(nbytes, self.wait_policy, self._emulation)

    def mailbox(self, hosts: Sequence[int] | None = None) -> Mailbox:
        """Return a mailbox for two-sided messages, which may come from any sender.

        Only one mailbox may be open at a time, because all mailboxes use the same MPI tags.

        Args:
            hosts: The rank of each endpoint, such as a worker. By default, each rank is one
                endpoint.
        """
        return Mailbox(self.wait_policy, self._emulation, hosts or range(self.size), self.rules)

    def eager_mailbox(
        self, routes: Mapping[Route, int], hosts: Sequence[int] | None = None
    ) -> EagerMailbox:
        """Return a mailbox in which senders write into the memory of the receiver (collective).

        Args:
            routes: For each pair of endpoints (sender, receiver), the bytes of the longest message
                between them.
            hosts: The rank of each endpoint, such as a worker. By default, each rank is one
                endpoint.
        """
        arguments = self.window, self.wait_policy, self._emulation
        return EagerMailbox(*arguments, hosts or range(self.size), routes)

    def rendezvous_mailbox(
        self, routes: Mapping[Route, int], hosts: Sequence[int] | None = None
    ) -> RendezvousMailbox:
        """Return a mailbox whose receivers fetch values of any length (collective).

        Args:
            routes: For each pair of endpoints (sender, receiver), the expected bytes of a message
                between them.
            hosts: The rank of each endpoint, such as a worker. By default, each rank is one
                endpoint.
        """
        arguments = self.window, self.wait_policy, self._emulation
        return RendezvousMailbox(*arguments, hosts or range(self.size), routes)

    def set_slowdown(self, slow: Mapping[int, Slowdown], seed: int) -> None:
        """Set or remove the artificial slowdown of this rank.

        Args:
            slow: Mapping from the number of each slow rank to its slowdown. Ranks without an entry
                in `slow` run at full speed.
            seed: The seed of the random slowdown factors.
        """
        slowdown = slow.get(self.rank)
        self.slowness = (
            None if slowdown is None else Slowness(slowdown, self.rank, seed, self.clock)
        )

    def inject_faults(self, injector: Injector) -> None:
        """Inject faults into the messages and the computation of this rank from now on."""
        self.rules.injector = injector
        self.slowness = FaultSlowdown(injector, self.slowness, self.clock)

    def apply_slowdown(self, computed: float) -> None:
        """Sleep for the additional time by which the artificial slowdown extends a computation.

        Args:
            computed: The real seconds of the last computation.
        """
        if self.slowness is not None:
            self.slowness.act(computed)

    def _refuse_hosts(self) -> None:
        if not self.on_one_host:
            self.board.close()
            self._comm.Free()
            raise InvalidInput(
                f"network={self.network} can only be emulated between ranks of one host, but "
                "these ranks run on several hosts; remove network, or use one host"
            )

    def release_spares(self) -> None:
        """Release the spare ranks, so that they no longer wait for the death of a rank."""
        if self.membership is not None:
            self.membership.release_spares()

    def leave(self) -> None:
        """Announce that this rank makes no more calls, so ranks that wait for it raise an error."""
        self.board.enter("the end of its program", waiting=True)

    def close(self) -> None:
        """Free the MPI objects of this Communicator (collective)."""
        self.barrier("the end of the call")
        with self.wait_policy.failure_guard:
            self._memory.close()
            if self._memory.wait_policy is not self.wait_policy:
                self._memory.wait_policy.comm.Free()
            if self._emulation:
                self._emulation.close()
            self.board.close()
            self._comm.Free()


def _array_text(values: np.ndarray) -> str:
    return f"{values.dtype.name}{list(values.shape)}"


def computing(communicator: Communicator) -> Callable[[], AbstractContextManager[None]]:
    """Return a function whose context managers slow down this rank's computations.

    The slowdown ignores the time that the context spends on waits for other ranks and on transfers.

    Args:
        communicator: The communicator of all ranks. The rank number in `communicator` selects the
            slowdown and the sequence of random slowdown factors.
    """
    clock = communicator.clock
    if communicator.slowness is None:
        return nullcontext

    @contextmanager
    def slowly() -> Iterator[None]:
        before, start = communicator.traffic.copy(), clock.now()
        yield
        seconds = clock.now() - start
        spent = communicator.traffic.since(before)
        others = spent.wait_seconds + spent.transfer_seconds
        communicator.apply_slowdown(max(0.0, seconds - others))

    return slowly
