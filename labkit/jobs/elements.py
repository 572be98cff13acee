"""Tasks of a Slurm job array: queries of their states, and records of how they ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.hosts.host_list import login
from labkit.hosts.queue import Queue, SlurmJob
from labkit.records import folders as registry
from labkit.records import store

# Slurm reports the reason JobLaunchFailure for an array task that could not start. For example, a
# node may lack the folder of the sweep.
NEVER_BEGAN = "JobLaunchFailure"
# A cancelled array task must end within `PATIENCE` seconds; Slurm is queried every `LOOK_EVERY`
# seconds.
PATIENCE, LOOK_EVERY = 80.0, 2.0
ELSEWHERE = "was not started by this user on this machine; stop it where it was started"
# In a final state from `FAULTS`, an array task failed or ended by itself. Final states outside
# `FAULTS` mean an interruption.
FAULTS = frozenset({"OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "FAILED", "COMPLETED"})


class Elements:
    """A cache of the states of Slurm array tasks, which queries Slurm only once per job array.

    If Slurm does not answer, the status in the array task's record is used.
    """

    def __init__(self) -> None:
        self._jobs_of_array: dict[str, dict[str, SlurmJob] | None] = {}

    def present_status(self, status: store.Record) -> store.Record:
        """Return a recorded status, updated with Slurm's present state of the array task."""
        number = number_of(status)
        if not number or status["state"] in store.END_STATES:
            return status
        array = number.partition("_")[0]
        if array not in self._jobs_of_array:
            self._jobs_of_array[array] = query_elements(array)
        if (jobs := self._jobs_of_array[array]) is None:
            return status
        job = jobs.get(number)
        if job is None or job.has_ended:
            return status | {"state": "interrupted", "cause": cause(job)}
        return status | {"cause": job.summary if job.is_pending else None}


def number_of(status: store.Record) -> str:
    """Return the array task number in a record, such as "12_3" (array and index), or "" if none."""
    number = str(status.get("element", ""))
    # Another user may have written the number of the array task. The code validates the number
    # before squeue gets it as an argument.
    return number if re.fullmatch(r"[0-9]+_[0-9]+", number) else ""


def numbered(jobs: Iterable[SlurmJob]) -> dict[str, SlurmJob]:
    """Return a mapping from job numbers to the given Slurm jobs."""
    return {job.number: job for job in jobs}


def cause(job: SlurmJob | None) -> str:
    """Return why a Slurm array task ended, for a task whose record states no cause."""
    if job is None:
        return "Slurm no longer has a record of the run's job array element"
    reason = f", {job.reason}" if job.reason else ""
    return job.cause or (
        f"its job array element {job.number} ended without a record ({job.state}{reason}); all "
        "nodes need access to the sweep's folder and to this Python"
    )


def open_elements(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the job folders of unfinished Slurm array tasks, by the number of the task."""
    elements = {}
    for folder in folders:
        try:
            status = store.read_status(folder)
        except LabkitError:  # a notebook run without a record has no Slurm array task
            continue
        if (number := number_of(status)) and status["state"] not in store.END_STATES:
            elements[number] = folder
    return elements


def check_ended(elements: Mapping[str, Path], jobs: Mapping[str, SlurmJob]) -> None:
    """Raise an error if an earlier array task of a sweep's notebook run has not ended.

    An array task that still runs could write into the folder of a notebook run that starts again.

    Args:
        elements: Folders of the sweep's notebook runs, by array task number.
        jobs: Jobs that Slurm reports, by array task number.

    Raises:
        LabkitError: An array task has not ended yet.
    """
    for number, folder in elements.items():
        if (job := jobs.get(number)) is not None and not job.has_ended:
            raise LabkitError(
                f"{folder.name}: its record names an unfinished Slurm job ({job.summary}); if this "
                f"sweep submitted the job, cancel it (scancel {number}) or wait for its end, then "
                f"resume the sweep; if not, remove the folder {folder.name}"
            )


def settle(folder: Path, job: SlurmJob | None, reason: str = "") -> None:
    """Record how a Slurm array task ended; a recorded end stays if Slurm knows no cause.

    Args:
        folder: Job folder of the array task.
        job: Job that Slurm reports for the array task. None means that Slurm no longer has a record
            of the job.
        reason: Reason why the array task was cancelled, or "" if this process does not know the
            reason.
    """
    status = store.read_status(folder)
    has_cause = bool(job and job.cause)
    if status["state"] == "completed" or (status["state"] in store.END_STATES and not has_cause):
        return
    reason = reason if reason and (job is None or job.state == "CANCELLED") else cause(job)
    record = store.fail if job and job.state in FAULTS else store.interrupt
    # A reader that sees an ended job then reads the runs of the job. The runs are therefore
    # recorded as ended before their job.
    for run in store.runs_of(folder):
        if store.read_status(run)["state"] == "running":
            record(run, reason)
    record(folder, reason)


def is_ours(job: Path, number: str) -> bool:
    """Return whether this user submitted the array task `number` of a sweep's notebook run."""
    return number.partition("_")[0] in registry.arrays(job.parent)


def queued(jobs: Iterable[Path], say: Callable[[str], None]) -> dict[str, Path]:
    """Return a mapping from array task number to job folder, for tasks that have not ended.

    Args:
        jobs: Folders of the jobs.
        say: Function that prints a message about other users' and other machines' array tasks. The
            result omits array tasks that this user did not submit on this machine.
    """
    slurm, elements = Elements(), {}
    for path in jobs:
        try:
            status = slurm.present_status(store.read_status(path))
        except LabkitError:  # The function omits a damaged record, because `labkit ls` reports it.
            continue
        if not (number := number_of(status)) or status["state"] in store.END_STATES:
            continue
        if is_ours(path, number):
            elements[number] = path
        else:
            say(f"{path} {ELSEWHERE}")
    return elements


def cancel(elements: Mapping[str, Path], say: Callable[[str], None]) -> list[Path]:
    """Cancel Slurm array tasks and record their ends; return the folders of tasks that still run.

    Raises:
        LabkitError: Slurm does not answer.
    """
    queue, remaining = Queue(login()), {**elements}
    numbers = ",".join(remaining)
    queue.cancel(jobs=numbers)
    end = time.monotonic() + PATIENCE
    while remaining and time.monotonic() < end:
        time.sleep(LOOK_EVERY)
        known = numbered(queue.jobs(jobs=numbers))
        for number, path in list(remaining.items()):
            job = known.get(number)
            if job is None or job.has_ended:
                settle(path, job, "cancelled by labkit stop")
                say(f"stopped: {path}")
                del remaining[number]
    for number, path in remaining.items():
        say(f"{path} does not end; its Slurm job array element is {number}")
    return [*remaining.values()]


def query_elements(array: str) -> dict[str, SlurmJob] | None:
    """Return Slurm's jobs by number, for ids such as "12,13"; None if Slurm does not answer."""
    try:
        return numbered(Queue(login()).jobs(jobs=array))
    except LabkitError:  # If Slurm is missing or does not answer, only the job records are used.
        return None
