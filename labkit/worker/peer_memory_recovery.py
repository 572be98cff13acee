"""Training that goes on from what ranks have in memory, when spares take the places of the dead."""

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
from labkit.records.pieces import Rank, packed

if TYPE_CHECKING:
    from labkit.worker.keeper import Keeper

SHARE = 0.02  # of the time that training takes, for copies
KEPT = 2  # of a rank: somebody may be gone while the newest is on its way
Fault = dict[str, Any]


class RestartTraining(Exception):
    """Those that live have agreed on their state: all ranks begin anew from it."""


class RecoveryNotice(NamedTuple):
    """What a rank that has lived tells of itself.

    Attributes:
        sizes: bytes of the files that it has in memory, by step and the number of whose it is.
        replicas: each file has all that ranks share.
        stood: steps that it had taken.
        fault: what has happened, as far as it is known.
        faults: before.
    """

    sizes: dict[int, dict[int, int]]
    replicas: bool
    stood: int
    fault: Fault
    faults: list[Fault]


class PeerMemoryRecovery(keras.callbacks.Callback):
    """Copies of what ranks hold, in the memory of others, and the way back to them.

    Of a model that is cut over ranks each rank copies its pieces, as a checkpoint has them, into
    its own memory and into that of the next rank, on another host where there is one; so often
    that it takes 2 % of the time. After a death all go back to the newest step of which somebody
    has each piece. Replicas need no copies: the state of those that live is given to all.

    Args:
        communicator: the ranks; of a spare those that it has just joined.
        report: receives what each comeback has cost, see `labkit.records.stream`.

    Attributes:
        faults: for the record, one for each time that ranks were gone.
        pending: something was lost: `gather` comes before training.
        is_off: this training does not come back so.
    """

    def __init__(
        self, communicator: Communicator, report: Callable[[str, list[Fault]], None]
    ) -> None:
        super().__init__()
        self._report = report
        self._communicator, self._clock = communicator, communicator.clock
        self._is_new = self.pending = bool(communicator.crew and communicator.crew.has_joined)
        self._held: dict[int, dict[int, bytes]] = {}  # by step, then by the number of whose it is
        self._replicas = False
        self._keeper: Keeper | None = None
        self._ring: list[int] = []
        self._begun = self._mark = self._clock.now()
        self._stood = self._until = self._copied_at = self._due = 0
        self._fault: Fault = {}
        self.is_off = False
        self.faults: list[Fault] = []

    @property
    def is_possible(self) -> bool:
        """Whether it was a death that has ended training, and a spare may be left."""
        communicator = self._communicator
        died = isinstance(communicator.patience.trouble, RankDied)
        return died and communicator.spares > 0 and not self.is_off

    def beside(self, keeper: Keeper, replicas: bool) -> Self:
        """Stand behind the keeper of a training that begins; it makes the copies."""
        self._keeper, self._replicas = keeper, replicas
        self._stood = self._copied_at = keeper.taken
        self._due = keeper.taken + 2  # the first step traces
        self._copied_when = self._clock.now()
        return self

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step begins; the first one ends what was made anew."""
        self._begun = self._clock.now()
        self._lap("rebuild")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A step is taken: perhaps its state is copied."""
        self._stood += 1
        if self._stood >= self._until:
            self._lap("repeat")
        if self._stood == self._due and not self._replicas and self._communicator.spares:
            self._copy()

    def _lap(self, name: str) -> None:
        """Note once what a part of the last comeback has taken."""
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
        of_a_step = (start - self._copied_when) / (self._stood - self._copied_at)
        file = self._file(self._keeper)  # first: from here on nothing is on its way
        own, before, after = self._neighbours()
        lengths = communicator.everyone(len(file), "the lengths of copies")
        theirs = np.empty(int(lengths[before]), np.uint8)
        sent = communicator.post(np.frombuffer(file, np.uint8), after)
        communicator.recv(theirs, before)
        communicator.finish(sent)
        self._held[self._stood] = {own: file, before: theirs.tobytes()}
        for step in sorted(self._held)[:-KEPT]:
            del self._held[step]
        self._copied_at, self._copied_when = self._stood, self._clock.now()
        cost = (self._copied_when - start) / of_a_step
        dearest = communicator.everyone(cost, "the cost of copies").max()
        self._due = self._stood + max(1, math.ceil(dearest / SHARE))

    def _neighbours(self) -> tuple[int, int, int]:
        """This rank, whose copy it has, and who has its."""
        if not self._ring:
            hosts = self._communicator.allgather(socket.gethostname(), "the hosts of copies")
            place = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
            self._ring = sorted(range(len(hosts)), key=lambda r: (place[r], hosts[r]))
        at = self._ring.index(self._communicator.rank)
        return self._ring[at], self._ring[at - 1], self._ring[(at + 1) % len(self._ring)]

    @staticmethod
    def _file(keeper: Keeper) -> bytes:
        copied = keeper.copied()
        return packed(copied.everything, {**copied.told, "manifest": dict(copied.manifest)})

    def lose(self) -> None:
        """Go on as the ranks that live (collective of these)."""
        noticed = self._clock.now()
        self._notice(self._communicator.shrink(), noticed - self._begun, noticed)

    def offer(self, keeper: Keeper, fault: Fault, noticed: float) -> None:
        """Have the state of this replica ready for all, as those that live have agreed."""
        self._held = {keeper.taken: {self._communicator.number: self._file(keeper)}}
        self._replicas, self._stood = True, keeper.taken
        self._notice(fault.pop("ranks"), fault["seconds"]["detect"], noticed)
        self._fault = fault | self._fault

    def _notice(self, ranks: Sequence[int], detect: float, noticed: float) -> None:
        if not self.pending:
            self._fault, self._mark = {"ranks": [], "seconds": {"detect": detect}}, noticed
        self._fault["ranks"] = sorted({*self._fault["ranks"], *ranks})
        self.pending = True

    def gather(self, keeping: CheckpointContext | None) -> CheckpointContext | None:
        """Let spares in, and say from where all go on (collective of those that live, and spares).

        Args:
            keeping: what ranks were told when the call began.

        Raises:
            RankDied: too few spares are left for what only the dead have had.
        """
        communicator = self._communicator
        if not self._is_new:
            communicator.replace()
        known = RecoveryNotice(self._sizes, self._replicas, self._stood, self._fault, self.faults)
        own, self._is_new = None if self._is_new else known, False
        told = communicator.allgather(own, "the copies that there are")
        first = next(each for each in told if each is not None)
        assert communicator.crew is not None
        numbers, wanted = communicator.numbers, set(range(communicator.crew.size))
        if (missing := sorted(wanted - set(numbers))) and not first.replicas:
            raise RankDied(missing)
        stood = max(each.stood for each in told if each is not None)
        sizes = [{} if each is None else each.sizes for each in told]
        step, holders = _newest(sizes, numbers, set() if first.replicas else wanted)
        given = {n: self._held[step][n] for n, rank in holders.items() if rank == communicator.rank}
        files: dict[int, bytes] = {}
        for part in communicator.allgather(given, "copies from memory"):
            files |= part
        self._tell(first, step, stood, holders, files)
        back = keeping.resume.step if keeping is not None and keeping.resume and not files else step
        if keeping is not None and communicator.rank == 0 and Path(keeping.folder).is_dir():
            checkpoints.go_back(Path(keeping.folder), back)
        if not files:
            self._held = {}
            return keeping
        _, before, _ = self._neighbours()
        kept = () if first.replicas else (communicator.rank, before)
        self._held = {step: {number: files[number] for number in kept}}
        by_rank = {numbers.index(number): file for number, file in files.items()}
        manifest: Any = Rank(next(iter(files.values()))).told["manifest"]
        resume = Resume("", manifest, True, files=by_rank)
        return (keeping or CheckpointContext(None))._replace(resume=resume, goes_on=True)

    @property
    def _sizes(self) -> dict[int, dict[int, int]]:
        return {step: {n: len(f) for n, f in files.items()} for step, files in self._held.items()}

    def _tell(
        self,
        first: RecoveryNotice,
        step: int,
        stood: int,
        holders: Mapping[int, int],
        files: Mapping[int, bytes],
    ) -> None:
        """Write down what has happened, alike on all ranks."""
        gone = first.fault["ranks"]
        copies = [
            {"of": n, "from": holders[n], "age": stood - step, "bytes": len(files[n])}
            for n in gone
            if n in files
        ]
        source = "the ranks that live" if first.replicas else "memory" if files else "the begin"
        told: Fault = {"step": step, "repeated": stood - step} | first.fault
        told |= {"source": source, "copies": copies, "spares_left": self._communicator.spares}
        if first.replicas:
            told["bytes"] = sum(map(len, files.values()))
        told["seconds"] = dict(first.fault["seconds"])
        self.faults = [*first.faults, told]
        self.pending, self._until, self._ring = False, stood, []
        self._lap("agree")


def _newest(
    sizes: Sequence[Mapping[int, Mapping[int, int]]], numbers: Sequence[int], wanted: set[int]
) -> tuple[int, dict[int, int]]:
    """The newest step of which somebody has each file, and who; step 0 and nobody if there is none.

    >>> _newest([{4: {0: 9, 1: 9}, 8: {0: 9}}, {}], [0, 1], {0, 1})
    (4, {0: 0, 1: 0})
    """
    for step in sorted({step for size in sizes for step in size}, reverse=True):
        holders: dict[int, int] = {}
        for rank, size in enumerate(sizes):
            for number in size.get(step, {}):
                if number not in holders or number == numbers[rank]:
                    holders[number] = rank
        if wanted <= holders.keys():
            return step, holders
    return 0, {}
