"""Deaths after which a call is sent anew: it goes on from a checkpoint, or begins again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from labkit.cluster.calls import RankError, Refused
from labkit.cluster.resume import same
from labkit.common.errors import LabkitError
from labkit.communicator.status_table import ENDED
from labkit.experiment import Experiment
from labkit.network.fault import left
from labkit.records import checkpoints
from labkit.records.checkpoints import CheckpointContext, Resume
from labkit.records.endings import ASKS
from labkit.records.stream import FOLDER, Told

TRIES = 3  # times that a call is sent and its ranks die no further than ranks died before


def victims(
    error: RankError, dead: Collection[int], all_ended: bool, outlived: Collection[int] = ()
) -> list[int]:
    """The ranks by whose death a call has ended, which is sent again; none where an error is why.

    Args:
        error: how it has ended.
        dead: ranks that are gone.
        all_ended: whether all engines have ended: because of the rank of the error, if it has one.
        outlived: ranks whose death the call had gone on after, whatever ends it now; of a spare
            the rank whose place it had.
    """
    if error.signal in ASKS or isinstance(error, Refused):
        return []
    alone = {error.rank} if all_ended and error.rank is not None else set()
    late = [rank for rank in sorted(dead) if rank not in outlived]
    found = {*late[: max(0, len(dead) - len(outlived))], *alone}
    # Words that speak of a death are of one that nobody has outlived.
    return sorted(found or (dead if ENDED in str(error) else ()))


class Setbacks:
    """How often a call has lost ranks that it cannot do without, and what each time has cost.

    It goes on from the newest whole checkpoint, or from where it began. Deaths alone lead to that:
    an error that a rank raises is the program's own, and the next attempt would raise it, too. A
    program may also kill its rank, such as by its memory: the run ends with the death after which
    `TRIES` calls in a row have come no further, and have no newer checkpoint either.

    Args:
        directory: of the run.
        experiment: what is run.
        keeping: what its ranks were told first; None: it keeps nothing, and begins anew.

    Attributes:
        experiment: what is still to be run: a kill that was planted, and has happened, is not.
        told: for the record, one for each time: the ranks, the step that it went back to, the
            steps that are repeated, the source, and seconds: from the last word of the dead until
            all others had ended (`detect`), until the engines were there again (`rebuild`), until
            the ranks had data and model (`prepare`), until they stood where they had (`repeat`).
    """

    def __init__(
        self, directory: Path, experiment: Experiment, keeping: CheckpointContext | None
    ) -> None:
        self._directory, self.experiment, self._keeping = directory, experiment, keeping
        self._since, self._detect = time.monotonic(), 0.0
        self._begin = keeping.resume.step if keeping is not None and keeping.resume else 0
        self._back = self._reached = self._begin
        self._taken: dict[int, int] = {}  # steps, by rank, since then
        self._stood, self._tries = -1, 0  # the furthest step of a death, and calls that ended there
        self.told: list[dict[str, Any]] = []
        self._outlived: list[dict[str, Any]] = []  # since the call was sent last

    def hear(self, told: Iterable[Told]) -> None:
        """Take in what ranks tell: how far they have come, and how long that took."""
        for kind, record in told:
            if kind == "fault":
                self._outlived.append(record)
            if kind == "step":
                self._taken[int(record["rank"])] = int(record["step"]) + 1
                # Steps of programs, as their checkpoints count them, are those of all workers.
                total = sum if self.experiment.plays else max
                self._reached = max(self._reached, total(self._taken.values()))
            seconds = self.told[-1]["seconds"] if self.told else {}
            if "rebuild" in seconds and "prepare" not in seconds:
                if kind == "doing" and record["what"] == "training":
                    seconds["prepare"] = self._lap()
            elif "prepare" in seconds and "repeat" not in seconds and self._reached >= self._stood:
                seconds["repeat"] = self._lap()

    def notice(self, ranks: Sequence[int]) -> None:
        """Ranks are gone, and all others have ended."""
        files = [self._directory / FOLDER / f"rank{rank}.jsonl" for rank in ranks]
        words = [path.stat().st_mtime for path in files if path.exists()]
        self._detect = time.time() - min(words) if words else self._lap()
        self._since = time.monotonic()

    @property
    def outlived(self) -> list[int]:
        """Ranks that have died since the call was sent last, and without which it goes on."""
        return [rank for fault in self._outlived for rank in fault["ranks"]]

    @property
    def deaths(self) -> int:
        """How many ranks were gone when the call was sent last."""
        return sum(len(each["ranks"]) for each in self.told)

    def go_back(self, ranks: Sequence[int], error: RankError) -> CheckpointContext | None:
        """Say what ranks are told that go on; nobody writes a checkpoint any more.

        Args:
            ranks: that were gone.
            error: how the call has ended.

        Raises:
            RankError: nothing has gone on since ranks died before, `TRIES` times.
        """
        resume, damage = self._newest()
        folder = self._directory / checkpoints.FOLDER
        back = self._begin if resume is None else resume.step
        came_further = self._reached > self._stood or back > self._back
        self._stood = max(self._stood, self._reached)
        self._tries = 1 if came_further else self._tries + 1
        if self._tries >= TRIES:
            raise RankError(
                f"{error}; ranks had died at step {self._stood} before, and gone back to step "
                f"{back} {TRIES} calls have come no further: the run ends here, for it would go on "
                "so",
                error.rank,
            )
        if resume is not None:
            checkpoints.go_back(folder, back)
        elif damage:  # it may pass, such as too many open files: who looks finds all as it was
            damage = f"{damage}; they lie in {_put_aside(folder).name}"
        else:
            shutil.rmtree(folder, ignore_errors=True)  # halves
        faults = left(left(self.experiment.faults, self.outlived), ranks)
        self.told += self._outlived  # those that have gone on after it are no more
        self._outlived = []
        self.told.append(
            {
                "ranks": list(ranks),
                "step": back,
                "repeated": max(0, self._reached - back),  # a word of the last ones may be lost
                "source": "the begin" if resume is None and not back else "checkpoint",
                "seconds": {"detect": max(0.0, self._detect)},
                **({"notes": [damage]} if damage else {}),
            }
        )
        self.experiment = self.experiment.replace(faults=faults)
        self._back, self._reached, self._taken = back, back, {}
        if resume is None:
            return self._keeping
        return (self._keeping or CheckpointContext(None))._replace(resume=resume, goes_on=True)

    def _newest(self) -> tuple[Resume | None, str]:
        """The newest whole checkpoint, and what is wrong where there are only damaged ones."""
        try:
            return checkpoints.newest(self._directory.resolve(), same(self.experiment)), ""
        except LabkitError as error:
            if self._keeping is not None and self._keeping.goes_on:  # it began with one of these
                self._keeping, self._begin = self._keeping._replace(resume=None, goes_on=False), 0
            return None, str(error)

    @property
    def sentence(self) -> str:
        """What has happened last, and what follows, in one line."""
        last = self.told[-1]
        who, step = ", ".join(map(str, last["ranks"])), last["step"]
        follows = f"training goes on from step {step}" if step else "the run begins again"
        return f"rank {who} died: {follows}"

    def sent(self) -> None:
        """The engines are there again, and the call is sent."""
        self.told[-1]["seconds"]["rebuild"] = self._lap()

    def _lap(self) -> float:
        before, self._since = self._since, time.monotonic()
        return self._since - before


def _put_aside(folder: Path) -> Path:
    """Give a folder of damaged checkpoints the next free name."""
    names = (folder.with_name(f"{folder.name}.damaged-{n}") for n in count(1))
    return folder.rename(next(name for name in names if not os.path.lexists(name)))
