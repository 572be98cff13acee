"""Elements of a job array of Slurm's: how they stand, and what is recorded of their ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.hosts.connection import login
from labkit.hosts.queue import Job, Queue
from labkit.records import registry, store

NEVER_BEGAN = "JobLaunchFailure"  # Slurm's reason, such as for a folder that the node does not see
PATIENCE, LOOK_EVERY = 80.0, 2.0  # seconds until an element must have ended, and between questions
ELSEWHERE = "was not started by this user on this machine; stop it where it was started"
# States in which Slurm ends an element that nobody has asked to end; others are interruptions.
FAULTS = frozenset({"OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "FAILED", "COMPLETED"})


class Elements:
    """What Slurm says of elements; each array is asked for once.

    Where it cannot be asked, records count as they are.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Job] | None] = {}

    def as_it_is(self, status: store.Record) -> store.Record:
        """A status, or what has become of its element since it was written."""
        number = number_of(status)
        if not number or status["state"] in store.ENDED:
            return status
        array = number.partition("_")[0]
        if array not in self._known:
            self._known[array] = asked(array)
        if (jobs := self._known[array]) is None:
            return status
        job = jobs.get(number)
        if job is None or job.has_ended:
            return status | {"state": "interrupted", "cause": cause(job)}
        return status | {"cause": job.told if job.waits else None}


def number_of(status: store.Record) -> str:
    """The number of the element that a record names, "12_3"; "" where it names none."""
    number = str(status.get("element", ""))
    # A record may be a stranger's, and the number becomes a word of squeue's.
    return number if re.fullmatch(r"[0-9]+_[0-9]+", number) else ""


def numbered(jobs: Iterable[Job]) -> dict[str, Job]:
    """Jobs by their numbers."""
    return {job.number: job for job in jobs}


def cause(job: Job | None) -> str:
    """Why an element has ended that has not said so itself."""
    if job is None:
        return "Slurm does not know its element any more"
    reason = f", {job.reason}" if job.reason else ""
    return job.cause or (
        f"its element {job.number} ended without a word ({job.state}{reason}): all nodes must see "
        "the sweep's folder and this Python"
    )


def open_elements(folders: Iterable[Path]) -> dict[str, Path]:
    """Folders of jobs whose records name elements and no end, by the numbers of these."""
    found = {}
    for folder in folders:
        try:
            status = store.read_status(folder)
        except LabkitError:  # a member that has no record has no element
            continue
        if (number := number_of(status)) and status["state"] not in store.ENDED:
            found[number] = folder
    return found


def check_ended(elements: Mapping[str, Path], known: Mapping[str, Job]) -> None:
    """Refuse that members run anew whose elements may still write.

    Args:
        elements: folders of the members, by their elements' numbers.
        known: what Slurm says of elements, by their numbers.

    Raises:
        LabkitError: Slurm has not ended one of them.
    """
    for number, folder in elements.items():
        if (job := known.get(number)) is not None and not job.has_ended:
            raise LabkitError(
                f"{folder.name}: {job.told}, which its record names; if this sweep submitted it, "
                f"end it (scancel {number}) or wait for its end, and resume then; if not, remove "
                f"the folder {folder.name}"
            )


def settle(folder: Path, job: Job | None, why: str = "") -> None:
    """Record how an element of Slurm's has ended, unless it has completed or knows better.

    Args:
        folder: of its job.
        job: as Slurm has it; None: not any more.
        why: it was to end, where that is known here.
    """
    status = store.read_status(folder)
    told = bool(job and job.cause)
    if status["state"] == "completed" or (status["state"] in store.ENDED and not told):
        return
    reason = why if why and (job is None or job.state == "CANCELLED") else cause(job)
    record = store.fail if job and job.state in FAULTS else store.interrupt
    # Its runs first: who sees the job's end may read them.
    for run in store.runs_of(folder):
        if store.read_status(run)["state"] == "running":
            record(run, reason)
    record(folder, reason)


def is_ours(job: Path, number: str) -> bool:
    """Whether this user has submitted the element that the record of a sweep's member names."""
    return number.partition("_")[0] in registry.arrays(job.parent)


def queued(jobs: Iterable[Path], say: Callable[[str], None]) -> dict[str, Path]:
    """Folders of jobs that are elements which Slurm has not ended, by their numbers.

    Args:
        jobs: folders.
        say: is told of each element that this user has not submitted here; it is left out.
    """
    slurm, found = Elements(), {}
    for path in jobs:
        try:
            status = slurm.as_it_is(store.read_status(path))
        except LabkitError:  # `labkit ls` says what is wrong with it
            continue
        if not (number := number_of(status)) or status["state"] in store.ENDED:
            continue
        if is_ours(path, number):
            found[number] = path
        else:
            say(f"{path} {ELSEWHERE}")
    return found


def cancel(elements: Mapping[str, Path], say: Callable[[str], None]) -> list[Path]:
    """Let Slurm end elements, and record that; the folders of those that have not ended.

    Raises:
        LabkitError: Slurm does not answer.
    """
    queue, left = Queue(login()), {**elements}
    numbers = ",".join(left)
    queue.cancel(jobs=numbers)
    end = time.monotonic() + PATIENCE
    while left and time.monotonic() < end:
        time.sleep(LOOK_EVERY)
        known = numbered(queue.jobs(jobs=numbers))
        for number, path in list(left.items()):
            job = known.get(number)
            if job is None or job.has_ended:
                settle(path, job, "cancelled by labkit stop")
                say(f"stopped: {path}")
                del left[number]
    for number, path in left.items():
        say(f"{path} does not end; its element is {number}")
    return [*left.values()]


def asked(array: str) -> dict[str, Job] | None:
    """What Slurm says of an array's elements, or of those of "12,13"; None: it does not answer."""
    try:
        return numbered(Queue(login()).jobs(jobs=array))
    except LabkitError:  # no Slurm here, or it does not answer: the records are all there is
        return None
