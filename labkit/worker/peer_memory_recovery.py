"""Recovery after rank failures: spare ranks load the state from the memory of other ranks."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import keras
import numpy as np

from labkit.communicator import Communicator, RankDied
from labkit.records import checkpoints
from labkit.records.checkpoints import CheckpointContext, Resume
from labkit.records.tensor_boxes import RankFile, pack

if TYPE_CHECKING:
    from labkit.worker.checkpoint_keeper import CheckpointKeeper

# Copies of the training state may take at most the fraction `SHARE` of the training time.
SHARE = 0.02
KEPT = 2  # Ranks store copies of two steps, because a rank may fail while it sends the newest copy.
Fault = dict[str, Any]


class RestartTraining(Exception):
    """Raised on the surviving ranks once they have agreed on the state to restart from."""


class RecoveryNotice(NamedTuple):
    """What a surviving rank reports about copies of state files in its memory.

    Attributes:
        sizes: Bytes of each copied state file. The outer keys are steps, and the inner keys are the
            ranks whose state the files contain.
        replicas: Whether every rank holds the whole model. If so, each state file is complete.
        steps_taken: Number of training steps that the reporting rank had taken.
        fault: Entries for the run's record about this rank failure.
        faults: Entries for the run's record about earlier rank failures.
    """

    sizes: dict[int, dict[int, int]]
    replicas: bool
    steps_taken: int
    fault: Fault
    faults: list[Fault]


class PeerMemoryRecovery(keras.callbacks.Callback):
    """Copies each rank's state to the memory of other ranks, and restores it after failures.

    If a model is divided among ranks, each rank copies its own part, as in a checkpoint. One copy
    of a rank's state stays in the memory of the rank itself. Another copy of a rank's state goes to
    the next rank, if possible on another host. The interval between copies is chosen so that copies
    take at most 2 % of the training time. After a failure, all ranks return to the newest step for
    which copies of all ranks' parts survive. Replicas need no copies, because a surviving replica
    can broadcast its state.

    Args:
        communicator: Communicator of the training ranks. A spare rank passes the communicator that
            it has joined.
        report: Function that receives a record of each recovery, see `labkit.records.stream`.

    Attributes:
        faults: Entries for the run's record, one for each rank failure.
        pending: Whether a rank has failed, so that `admit_spares` must be called before training
            continues.
        is_off: Whether recovery from memory is impossible for this training.
    """

    def __init__(
        self, communicator: Communicator, report: Callable[[str, list[Fault]], None]
    ) -> None:
        super().__init__()
        self._report = report
        self._communicator, self._clock = communicator, communicator.clock
        self._is_new = self.pending = bool(
            communicator.membership and communicator.membership.has_joined
        )
        # The dict `_copies` holds copied state files, first by step, then by rank number.
        self._copies: dict[int, dict[int, bytes]] = {}
        self._replicas = False
        self._keeper: CheckpointKeeper | None = None
        self._ring: list[int] = []
        self._step_start = self._mark = self._clock.now()
        self._steps_taken = self._repeat_until = self._copied_at = self._due = 0
        self._fault: Fault = {}
        self.is_off = False
        self.faults: list[Fault] = []

    @property
    def is_possible(self) -> bool:
        """Whether a rank failure ended training and a spare rank can replace the failed rank."""
        communicator = self._communicator
        died = isinstance(communicator.wait_policy.first_error, RankDied)
        return died and communicator.spares > 0 and not self.is_off

    def prepare(self, keeper: CheckpointKeeper, replicas: bool) -> Self:
        """Prepare for a training; this callback must run after the checkpoint callback `keeper`."""
        self._keeper, self._replicas = keeper, replicas
        self._steps_taken = self._copied_at = keeper.steps_taken
        # The rank makes no copy in the first step, because the first step also traces the graph.
        self._due = keeper.steps_taken + 2
        self._copied_when = self._clock.now()
        return self

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record when a step begins; the first step after a recovery ends the phase "rebuild"."""
        self._step_start = self._clock.now()
        self._record_seconds("rebuild")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the training step, and copy the state if it is time for a copy."""
        self._steps_taken += 1
        if self._steps_taken >= self._repeat_until:
            self._record_seconds("repeat")
        if self._steps_taken == self._due and not self._replicas and self._communicator.spares:
            self._copy()

    def _record_seconds(self, name: str) -> None:
        """Record the seconds of a phase of the most recent recovery, unless already recorded."""
        seconds = self.faults[-1]["seconds"] if self.faults else {name: 0.0}
        if name not in seconds:
            now = self._clock.now()
            seconds[name], self._mark = now - self._mark, now
            if name == "repeat" and self._communicator.rank == 0:
                self._report("fault", self.faults[-1:])

    def _copy(self) -> None:
        communicator, start = self._communicator, self._clock.now()
        if communicator.size == 1 or self._keeper is None:
            return
        step_seconds = (start - self._copied_when) / (self._steps_taken - self._copied_at)
        # The state file is created before other communication, because its creation completes
        # pending messages.
        file = self._file(self._keeper)
        rank, before, after = self._neighbours()
        lengths = communicator.allgather_scalar(len(file), "the sizes of checkpoint copies")
        received = np.empty(int(lengths[before]), np.uint8)
        sent = communicator.post(np.frombuffer(file, np.uint8), after)
        communicator.recv(received, before)
        communicator.finish(sent)
        self._copies[self._steps_taken] = {rank: file, before: received.tobytes()}
        for step in sorted(self._copies)[:-KEPT]:
            del self._copies[step]
        self._copied_at, self._copied_when = self._steps_taken, self._clock.now()
        cost = (self._copied_when - start) / step_seconds
        max_cost = communicator.allgather_scalar(cost, "the cost of checkpoint copies").max()
        self._due = self._steps_taken + max(1, math.ceil(max_cost / SHARE))

    def _neighbours(self) -> tuple[int, int, int]:
        """Return this rank, the rank whose state it stores, and the rank that stores its state."""
        if not self._ring:
            hosts = self._communicator.allgather(socket.gethostname(), "the hosts of the ranks")
            place = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
            self._ring = sorted(range(len(hosts)), key=lambda r: (place[r], hosts[r]))
        at = self._ring.index(self._communicator.rank)
        return self._ring[at], self._ring[at - 1], self._ring[(at + 1) % len(self._ring)]

    @staticmethod
    def _file(keeper: CheckpointKeeper) -> bytes:
        copied = keeper.copied()
        return pack(copied.all_pieces, {**copied.told, "manifest": dict(copied.manifest)})

    def continue_without_failed(self) -> None:
        """Shrink the communicator to the surviving ranks (collective over the survivors)."""
        noticed_at = self._clock.now()
        self._notice(self._communicator.shrink(), noticed_at - self._step_start, noticed_at)

    def provide_state(self, keeper: CheckpointKeeper, fault: Fault, noticed_at: float) -> None:
        """Store the agreed state of this replica, so that spare ranks can receive it."""
        self._copies = {keeper.steps_taken: {self._communicator.number: self._file(keeper)}}
        self._replicas, self._steps_taken = True, keeper.steps_taken
        self._notice(fault.pop("ranks"), fault["seconds"]["detect"], noticed_at)
        self._fault = fault | self._fault

    def _notice(self, ranks: Sequence[int], detect: float, noticed_at: float) -> None:
        if not self.pending:
            self._fault, self._mark = {"ranks": [], "seconds": {"detect": detect}}, noticed_at
        self._fault["ranks"] = sorted({*self._fault["ranks"], *ranks})
        self.pending = True

    def admit_spares(
        self, checkpoint_context: CheckpointContext | None
    ) -> CheckpointContext | None:
        """Let spare ranks replace the failed ranks; return the checkpoint context to restart from.

        All surviving ranks and all spare ranks call this method together.

        Args:
            checkpoint_context: Checkpoint context with which training was first started.

        Raises:
            RankDied: If the model is divided, and there are too few spare ranks to replace all
                failed ranks.
        """
        communicator = self._communicator
        if not self._is_new:
            communicator.replace()
        local_notice = RecoveryNotice(
            self._sizes, self._replicas, self._steps_taken, self._fault, self.faults
        )
        notice, self._is_new = None if self._is_new else local_notice, False
        notices = communicator.allgather(notice, "the available copies")
        first = next(notice for notice in notices if notice is not None)
        assert communicator.membership is not None
        numbers, all_numbers = communicator.numbers, set(range(communicator.membership.size))
        if (missing := sorted(all_numbers - set(numbers))) and not first.replicas:
            raise RankDied(missing)
        steps_taken = max(notice.steps_taken for notice in notices if notice is not None)
        sizes = [{} if notice is None else notice.sizes for notice in notices]
        step, holders = _newest(sizes, numbers, set() if first.replicas else all_numbers)
        files_to_send = {
            n: self._copies[step][n] for n, rank in holders.items() if rank == communicator.rank
        }
        files: dict[int, bytes] = {}
        for part in communicator.allgather(files_to_send, "copies from memory"):
            files |= part
        self._record_fault(first, step, steps_taken, holders, files)
        back = (
            checkpoint_context.resume.step
            if checkpoint_context is not None and checkpoint_context.resume and not files
            else step
        )
        if (
            checkpoint_context is not None
            and communicator.rank == 0
            and Path(checkpoint_context.folder).is_dir()
        ):
            checkpoints.remove_after(Path(checkpoint_context.folder), back)
        if not files:
            self._copies = {}
            return checkpoint_context
        _, before, _ = self._neighbours()
        kept_numbers = () if first.replicas else (communicator.rank, before)
        self._copies = {step: {number: files[number] for number in kept_numbers}}
        by_rank = {numbers.index(number): file for number, file in files.items()}
        manifest: Any = RankFile(next(iter(files.values()))).record["manifest"]
        resume = Resume("", manifest, True, files=by_rank)
        return (checkpoint_context or CheckpointContext(None))._replace(resume=resume, goes_on=True)

    @property
    def _sizes(self) -> dict[int, dict[int, int]]:
        return {step: {n: len(f) for n, f in files.items()} for step, files in self._copies.items()}

    def _record_fault(
        self,
        first: RecoveryNotice,
        step: int,
        steps_taken: int,
        holders: Mapping[int, int],
        files: Mapping[int, bytes],
    ) -> None:
        """Record the rank failure; the entry is the same on all ranks."""
        failed = first.fault["ranks"]
        copies = [
            {"of": n, "from": holders[n], "age": steps_taken - step, "bytes": len(files[n])}
            for n in failed
            if n in files
        ]
        source = "the surviving ranks" if first.replicas else "memory" if files else "the begin"
        entry: Fault = {"step": step, "repeated": steps_taken - step} | first.fault
        entry |= {"source": source, "copies": copies, "spares_left": self._communicator.spares}
        if first.replicas:
            entry["bytes"] = sum(map(len, files.values()))
        entry["seconds"] = dict(first.fault["seconds"])
        self.faults = [*first.faults, entry]
        self.pending, self._repeat_until, self._ring = False, steps_taken, []
        self._record_seconds("agree")


def _newest(
    sizes: Sequence[Mapping[int, Mapping[int, int]]],
    numbers: Sequence[int],
    expected_numbers: set[int],
) -> tuple[int, dict[int, int]]:
    """Return the newest step with files of all ranks, and each file's holder; (0, {}) if none.

    >>> _newest([{4: {0: 9, 1: 9}, 8: {0: 9}}, {}], [0, 1], {0, 1})
    (4, {0: 0, 1: 0})
    """
    for step in sorted({step for size in sizes for step in size}, reverse=True):
        holders: dict[int, int] = {}
        for rank, size in enumerate(sizes):
            for number in size.get(step, {}):
                if number not in holders or number == numbers[rank]:
                    holders[number] = rank
        if expected_numbers <= holders.keys():
            return step, holders
    return 0, {}
