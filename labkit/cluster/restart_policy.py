"""Restarts of training after ranks have died, from the newest checkpoint or the first step."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from labkit.cluster.calls import RankError, Refused
from labkit.cluster.resume import is_compatible
from labkit.common.errors import LabkitError
from labkit.communicator.status_table import ENDED
from labkit.experiment import Experiment
from labkit.network.fault import remaining_faults
from labkit.records import checkpoints
from labkit.records.checkpoints import CheckpointContext, Resume
from labkit.records.endings import STOP_SIGNALS
from labkit.records.stream import FOLDER, Message

# Training fails if ranks die in three (TRIES) successive calls without progress.
TRIES = 3


def ranks_to_blame(
    error: RankError, dead: Collection[int], all_ended: bool, outlived: Collection[int] = ()
) -> list[int]:
    """Return the ranks whose death ended a call, or no rank if a program error ended the call.

    Args:
        error: The error with which the call has ended.
        dead: Ranks of processes that have died.
        all_ended: Whether all engine processes have ended; if they have, `error.rank` counts as
            dead.
        outlived: Ranks that had died earlier, while the call continued without them. A spare
            process that has died is listed under the rank that it had replaced.
    """
    if error.signal in STOP_SIGNALS or isinstance(error, Refused):
        return []
    culprit = {error.rank} if all_ended and error.rank is not None else set()
    unsurvived = [rank for rank in sorted(dead) if rank not in outlived]
    ranks = {*unsurvived[: max(0, len(dead) - len(outlived))], *culprit}
    # If `ranks` is empty but the error reports a death, all dead ranks are to blame.
    return sorted(ranks or (dead if ENDED in str(error) else ()))


class RestartPolicy:
    """The restarts of a call whose ranks have died, and the time that each restart costs.

    A call restarts from the newest complete checkpoint, or from its first step. Only the death of a
    rank leads to a restart. After an error of the program, a restart would repeat the error.
    A program may also kill its own rank by using too much memory. The run ends after `TRIES`
    successive calls in which a rank died and training made no progress. Progress means a later step
    or a newer checkpoint.

    Args:
        directory: Run directory.
        experiment: The experiment.
        context: Checkpoint settings of the first call; None: the run saves no checkpoints.

    Attributes:
        experiment: The experiment without the injected faults that have already killed a rank.
        restarts: Entries for the run's record, one per restart. An entry of `restarts` contains the
            dead ranks and the step of the restart. An entry of `restarts` also contains the number
            of repeated steps. An entry's `source` tells whether training restarted from a
            checkpoint or from its first step. An entry of `restarts` also contains the seconds of
            four successive phases. The phase `detect` lasts from the last message of the dead rank
            until all other ranks have ended. The phase `rebuild` lasts until the engine processes
            run again. The phase `prepare` lasts until the ranks have loaded the data and the model.
            The phase `repeat` lasts until the ranks have again reached the step at which the rank
            died.
    """

    def __init__(
        self, directory: Path, experiment: Experiment, context: CheckpointContext | None
    ) -> None:
        self._directory, self.experiment, self._context = directory, experiment, context
        self._since, self._detect = time.monotonic(), 0.0
        self._begin = context.resume.step if context is not None and context.resume else 0
        self._back = self._reached = self._begin
        # `_steps` maps each rank to the number of steps that it has completed since the restart.
        self._steps: dict[int, int] = {}
        # `_furthest` is the highest training step that any call has reached before a rank died.
        # `_tries` counts successive calls that have ended without progress of training.
        self._furthest, self._tries = -1, 0
        self.restarts: list[dict[str, Any]] = []
        # `_outlived` contains the deaths of ranks that the current call has survived.
        self._outlived: list[dict[str, Any]] = []

    def read(self, messages: Iterable[Message]) -> None:
        """Update the progress and the times from messages of the ranks."""
        for kind, record in messages:
            if kind == "fault":
                self._outlived.append(record)
            if kind == "step":
                self._steps[int(record["rank"])] = int(record["step"]) + 1
                # Some strategies run each worker as a program (`uses_programs`). For programs, a
                # checkpoint's step number is the sum of all workers' steps.
                total = sum if self.experiment.uses_programs else max
                self._reached = max(self._reached, total(self._steps.values()))
            seconds = self.restarts[-1]["seconds"] if self.restarts else {}
            if "rebuild" in seconds and "prepare" not in seconds:
                if kind == "doing" and record["what"] == "training":
                    seconds["prepare"] = self._lap()
            elif (
                "prepare" in seconds and "repeat" not in seconds and self._reached >= self._furthest
            ):
                seconds["repeat"] = self._lap()

    def note_deaths(self, ranks: Sequence[int]) -> None:
        """Record that the given ranks are dead and that all other ranks have ended."""
        files = [self._directory / FOLDER / f"rank{rank}.jsonl" for rank in ranks]
        times = [path.stat().st_mtime for path in files if path.exists()]
        self._detect = time.time() - min(times) if times else self._lap()
        self._since = time.monotonic()

    @property
    def outlived(self) -> list[int]:
        """Ranks whose death the current call has survived."""
        return [rank for fault in self._outlived for rank in fault["ranks"]]

    @property
    def deaths(self) -> int:
        """Total number of ranks that had died before the current call was sent."""
        return sum(len(restart["ranks"]) for restart in self.restarts)

    def roll_back(self, ranks: Sequence[int], error: RankError) -> CheckpointContext | None:
        """Return the checkpoint context for the next call; all ranks must already have ended.

        Args:
            ranks: Ranks that have died.
            error: The error with which the call has ended.

        Raises:
            RankError: `TRIES` successive calls have made no progress.
        """
        resume, damage = self._newest()
        folder = self._directory / checkpoints.FOLDER
        back = self._begin if resume is None else resume.step
        has_progressed = self._reached > self._furthest or back > self._back
        self._furthest = max(self._furthest, self._reached)
        self._tries = 1 if has_progressed else self._tries + 1
        if self._tries >= TRIES:
            raise RankError(
                f"{error}; ranks had also died at step {self._furthest} before, and {TRIES} "
                f"calls that began at step {back} reached no later step; the run ends, because "
                "another restart would probably fail, too",
                error.rank,
            )
        if resume is not None:
            checkpoints.remove_after(folder, back)
        elif damage:  # labkit keeps damaged checkpoints, because the damage may be temporary.
            damage = f"{damage}; the damaged checkpoints were moved to {_put_aside(folder).name}"
        else:
            # All checkpoints in the folder are incomplete.
            shutil.rmtree(folder, ignore_errors=True)
        faults = remaining_faults(remaining_faults(self.experiment.faults, self.outlived), ranks)
        self.restarts += self._outlived
        self._outlived = []
        self.restarts.append(
            {
                "ranks": list(ranks),
                "step": back,
                # If the last messages of the ranks were lost, `_reached` may be less than the
                # checkpoint's step `back`.
                "repeated": max(0, self._reached - back),
                "source": "the begin" if resume is None and not back else "checkpoint",
                "seconds": {"detect": max(0.0, self._detect)},
                **({"notes": [damage]} if damage else {}),
            }
        )
        self.experiment = self.experiment.replace(faults=faults)
        self._back, self._reached, self._steps = back, back, {}
        if resume is None:
            return self._context
        return (self._context or CheckpointContext(None))._replace(resume=resume, goes_on=True)

    def _newest(self) -> tuple[Resume | None, str]:
        """Return (newest complete checkpoint, ""), or (None, reason) if no checkpoint is usable."""
        try:
            return checkpoints.newest_checkpoint(
                self._directory.resolve(), is_compatible(self.experiment)
            ), ""
        except LabkitError as error:
            # If checkpoints of a resumed run become unreadable, training starts from the first
            # step.
            if self._context is not None and self._context.goes_on:
                self._context, self._begin = self._context._replace(resume=None, goes_on=False), 0
            return None, str(error)

    @property
    def sentence(self) -> str:
        """One line that names the ranks that died last, and the step at which training resumes."""
        last = self.restarts[-1]
        ranks, step = ", ".join(map(str, last["ranks"])), last["step"]
        follows = (
            f"training continues from step {step}" if step else "the run starts again from step 0"
        )
        return f"rank {ranks} died: {follows}"

    def note_restart(self) -> None:
        """Record that the engines run again and that the call was sent again."""
        self.restarts[-1]["seconds"]["rebuild"] = self._lap()

    def _lap(self) -> float:
        before, self._since = self._since, time.monotonic()
        return self._since - before


def _put_aside(folder: Path) -> Path:
    """Rename a folder of damaged checkpoints to the next unused name."""
    names = (folder.with_name(f"{folder.name}.damaged-{n}") for n in count(1))
    return folder.rename(next(name for name in names if not os.path.lexists(name)))
