"""Sweeps in Slurm: each notebook run of a sweep is one task of a Slurm job array."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.common import imports
from labkit.common.errors import LabkitError
from labkit.common.files import make_folder, read_file
from labkit.common.privacy import scrub
from labkit.common.units import plural
from labkit.hosts.host_list import login
from labkit.hosts.queue import ASK_EVERY, Queue, SlurmJob
from labkit.jobs.elements import NEVER_BEGAN, check_ended, is_ours, numbered, open_elements, settle
from labkit.jobs.job import LOG
from labkit.jobs.listing import elapsed
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep.progress_screen import Interrupts, SweepScreen
from labkit.jobs.sweep.sweep_plan import SweepMember, SweepPlan
from labkit.records import folders, store

LOOK_EVERY = 1.0  # The records of the sweep's notebook runs are read every `LOOK_EVERY` seconds.
# Slurm reports the reason JobHeldUser for a pending job that its user has put on hold.
HELD_REASON = "JobHeldUser"
# In a job's output, lines that Slurm adds begin with `slurmstepd` or `srun:`.
OF_SLURM = ("slurmstepd", "srun:")
NOT_OURS = "has ended, and no registry entry says who submitted it; its notebook run is repeated"
# The folder for the output of array tasks is hidden, so that searches skip it.
OUTPUT_FOLDER = ".slurm"


class Array:
    """A runner for the notebook runs of a sweep, each in its own Slurm allocation.

    The records of the notebook runs are read every LOOK_EVERY seconds. Slurm is queried every
    ASK_EVERY seconds, with one query for all notebook runs.

    Args:
        plan: Plan of the sweep.
        folder: Folder of the sweep, which all nodes must see.
        jobs: Maximum number of simultaneous notebook runs; if None, Slurm decides.
        options: Options of sbatch, such as "-N2 --ntasks-per-node=2 -t 10". Without options, sbatch
            requests the resources for the largest notebook run.
        screen: Display for progress lines.
    """

    def __init__(
        self, plan: SweepPlan, folder: Path, jobs: int | None, options: str, screen: SweepScreen
    ) -> None:
        self.plan, self.folder, self.jobs, self.options = plan, folder, jobs, options
        self.screen, self.queue = screen, Queue(login())
        # `_elements` maps the array task number to the running or queued notebook run.
        self._elements: dict[str, SweepMember] = {}
        self._unconfirmed: set[str] = set()
        self._most_running = 1
        self._cancelled = False
        self._interrupts = Interrupts(
            lambda: screen.say(
                "interrupted: Slurm ends the notebook runs (Ctrl-C again: do not wait)"
            )
        )

    def run(self, members: Sequence[SweepMember]) -> bool:
        """Execute notebook runs of a sweep; return False if the user interrupted them, else True.

        Array tasks that an earlier command left in Slurm's queue are monitored first.
        """
        with self._interrupts:
            self._find(members)
            found_folders = {member.folder for member in self._elements.values()}
            self._follow()
            remaining = [member for member in members if member.folder not in found_folders]
            if remaining and not self._interrupts.count:
                self._submit(remaining)
                self._follow()
        if not self._elements:
            folders.forget_arrays(self.folder)
        self.screen.close()
        return not self._interrupts.count

    def _find(self, members: Sequence[SweepMember]) -> None:
        """Find notebook runs that an earlier command queued, and record those that have ended.

        Raises:
            LabkitError: A record names an unfinished array task that this user did not submit.
        """
        named = {member.folder: member for member in members}
        unended = open_elements(self.folder / folder for folder in named)
        jobs = numbered(self.queue.jobs(jobs=arrays(unended))) if unended else {}
        earlier = {
            number: named[path.name] for number, path in unended.items() if is_ours(path, number)
        }
        # The record of a notebook run may contain the id of another Slurm job. Labkit neither
        # monitors nor cancels Slurm jobs of unknown origin.
        strange = {number: path for number, path in unended.items() if number not in earlier}
        check_ended(strange, jobs)
        for number, path in strange.items():
            self.screen.say(f"{path.name}: element {number} {NOT_OURS}")
        # Slurm array tasks that are still on hold are cancelled. The command that submitted the
        # tasks was killed before their release.
        if held_elements := [
            number for number, job in jobs.items() if job.is_pending and job.reason == HELD_REASON
        ]:
            self.queue.cancel(jobs=",".join(held_elements))
            self.screen.say(
                f"{plural(len(held_elements), 'element')} cancelled, left on hold by an "
                "interrupted submission"
            )
        for number, member in earlier.items():
            job = jobs.get(number)
            if job is None or job.has_ended:
                settle(self.folder / member.folder, job)
            elif number in held_elements:
                cancelled_job = job._replace(state="CANCELLED")
                settle(self.folder / member.folder, cancelled_job, "the submission was interrupted")
            else:
                self._elements[number] = member
        if self._elements:
            self.screen.say(
                f"{plural(len(self._elements), 'notebook run')} already in Slurm's queue"
            )

    def _submit(self, members: Sequence[SweepMember]) -> None:
        """Submit a job array on hold, write a record for each task, and release the array."""
        manifest.save_notebook(self.folder, self.plan)
        # Each Slurm array task reads its notebook run from sweep.json. The list in sweep.json must
        # therefore exist before a task starts.
        manifest.update(self.folder, elements=[member.folder for member in members])
        make_folder(self.folder / OUTPUT_FOLDER, self.folder)
        limit = f"%{self.jobs}" if self.jobs else ""
        element = [sys.executable, "-P", "-m", "labkit.jobs.sweep.element"]
        modules = imports.notebook_folders(self.plan.notebook)
        number = self.queue.submit(
            [*element, str(self.folder.resolve()), modules],
            f"--array=0-{len(members) - 1}{limit}",
            f"--job-name={self.folder.name}",
            f"--output={str(self.folder.resolve() / OUTPUT_FOLDER).replace('%', '%%')}/%A_%a.log",
            # A requeued Slurm array task would overwrite the files of its first attempt.
            "--no-requeue",
            *(shlex.split(self.options) or self._resource_options(members)),
            "--hold",
        )
        try:
            folders.add_array(self.folder, number)
            for index, member in enumerate(members):
                name = f"{number}_{index}"
                self._elements[name] = member
                manifest.queue(self.folder, self.plan, member, element=name)
            self.queue.release(number)
        except BaseException:
            self.queue.cancel(jobs=number)
            raise
        self.screen.say(
            f"job array {number} of {plural(len(members), 'notebook run')} is in Slurm's queue"
        )

    def _resource_options(self, members: Sequence[SweepMember]) -> list[str]:
        workers = max(member.workers for member in members)
        threads = max(member.threads for member in members)
        return [f"--ntasks={workers}", f"--cpus-per-task={threads}"]

    def _follow(self) -> None:
        """Monitor all array tasks until they have ended, or until the user interrupts twice."""
        asked_at, last_message = -ASK_EVERY, ""
        while self._elements and self._interrupts.count < 2:
            if self._interrupts.count and not self._cancelled:
                self._cancel()
            jobs: dict[str, SlurmJob] | None = None
            if time.monotonic() - asked_at >= ASK_EVERY:
                asked_at = time.monotonic()
                jobs = self._query_slurm()
                waiting = next((job for job in (jobs or {}).values() if job.is_pending), None)
                if waiting and (message := waiting.summary) != last_message:
                    last_message = message
                    self.screen.say(last_message)
            running = {}
            for number, member in list(self._elements.items()):
                status = manifest.status_of(self.folder / member.folder)
                if status.get("state") == "completed" or (
                    jobs is not None and self._has_ended(number, jobs.get(number), status)
                ):
                    self._end(number, member, (jobs or {}).get(number))
                elif status.get("state") == "running":
                    running[member.folder] = elapsed(status) or 0.0
            self._most_running = max(self._most_running, len(running))
            waiting_count = len(self._elements) - len(running)
            self.screen.tick(
                running, self.screen.remaining_time(waiting_count, running, self._most_running)
            )
            if self._elements:
                time.sleep(LOOK_EVERY)

    def _query_slurm(self) -> dict[str, SlurmJob] | None:
        """Return Slurm's jobs of all arrays; None if Slurm does not answer the query."""
        try:
            return numbered(self.queue.jobs(jobs=arrays(self._elements)))
        except LabkitError as error:
            self.screen.say(f"{error}; the notebook runs continue, and Slurm is queried again")
            return None

    def _has_ended(self, number: str, job: SlurmJob | None, status: store.Record) -> bool:
        """Return whether an array task has ended and its record is visible on this node.

        On a network file system, a new record becomes visible late. Another node may see a new
        record only after some seconds. An array task may seem to have ended without a record. A
        second query of Slurm must then confirm the end of the task.
        """
        if job is not None and not job.has_ended:
            return False
        sure = status.get("state") in store.END_STATES
        sure = sure or (job is not None and (job.cause != "" or job.reason == NEVER_BEGAN))
        if not sure and number not in self._unconfirmed:
            self._unconfirmed.add(number)
            return False
        return True

    def _end(self, number: str, member: SweepMember, job: SlurmJob | None) -> None:
        del self._elements[number]
        folder = self.folder / member.folder
        settle(folder, job, self._interrupts.why)
        self._save_output(self.folder / OUTPUT_FOLDER / f"{number}.log", folder / LOG)
        status = store.read_status(folder)
        seconds = elapsed(status) or 0.0
        rank = f"rank {status['rank']}: " if status["rank"] is not None else ""
        cause = f"{rank}{status['cause']}" if status["cause"] else None
        remaining_text = self.screen.remaining_time(len(self._elements), {}, self._most_running)
        self.screen.ended(member, status["state"], cause, seconds, remaining_text)

    def _save_output(self, source: Path, target: Path) -> None:
        """Save the output of an array task without Slurm's own lines, which contain node names."""
        text = read_file(source, root=self.folder) if source.exists() else b""
        lines = text.decode(errors="replace").splitlines()
        if own_lines := [line for line in lines if not line.startswith(OF_SLURM)]:
            make_folder(target.parent, self.folder)
            store.write_atomically(target, scrub("\n".join(own_lines) + "\n"))
        source.unlink(missing_ok=True)

    def _cancel(self) -> None:
        """Cancel the remaining array tasks; Slurm grants each of them time to clean up."""
        self._cancelled = True
        self.queue.cancel(jobs=",".join(self._elements))


def arrays(elements: Iterable[str]) -> str:
    """Return the distinct job array numbers of Slurm array tasks, separated by commas."""
    return ",".join(sorted({number.partition("_")[0] for number in elements}))
