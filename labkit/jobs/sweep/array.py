"""Members of a sweep as a job array of Slurm's: submitted at once, and followed to their ends."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.common.safe_files import make_folder, read_file
from labkit.common.units import plural
from labkit.hosts.connection import login
from labkit.hosts.queue import ASK_EVERY, Job, Queue
from labkit.jobs.elements import NEVER_BEGAN, check_ended, is_ours, numbered, open_elements, settle
from labkit.jobs.interrupts import Interrupts
from labkit.jobs.job import LOG
from labkit.jobs.listing import elapsed
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep.plan import Member, Plan
from labkit.jobs.sweep.screen import Screen
from labkit.records import registry, store

LOOK_EVERY = 1.0  # seconds between two looks at what elements have recorded
HELD = "JobHeldUser"  # Slurm's reason
OF_SLURM = ("slurmstepd", "srun:")
NOT_OURS = "has ended, and no note says who submitted it; the member runs anew"
SAID = ".slurm"  # folder of what elements say before they have a record; hidden: not searched


class Array:
    """Runs members of a plan, each on an allocation of its own.

    What they record is read as it is written; Slurm is asked every ASK_EVERY seconds, once for all.

    Args:
        plan: of the sweep.
        folder: of the sweep, which all nodes see.
        jobs: run so many at a time; None: as many as Slurm has nodes for.
        options: of sbatch, such as "-N2 --ntasks-per-node=2 -t 10"; "": as much as the largest
            member asks for.
        screen: is told what happens.
    """

    def __init__(
        self, plan: Plan, folder: Path, jobs: int | None, options: str, screen: Screen
    ) -> None:
        self.plan, self.folder, self.jobs, self.options = plan, folder, jobs, options
        self.screen, self.queue = screen, Queue(login())
        self._elements: dict[str, Member] = {}  # that have not ended, by their numbers
        self._doubted: set[str] = set()
        self._abreast = 1
        self._cancelled = False
        self._interrupts = Interrupts(
            lambda: screen.say("interrupted: Slurm ends the members (again: do not wait for them)")
        )

    def run(self, members: Sequence[Member]) -> bool:
        """Run these members; whether that came to its end without being interrupted.

        Elements that an earlier call has left in the queue are followed first.
        """
        with self._interrupts:
            self._find(members)
            found = {member.folder for member in self._elements.values()}
            self._follow()
            left = [member for member in members if member.folder not in found]
            if left and not self._interrupts.count:
                self._submit(left)
                self._follow()
        if not self._elements:
            registry.forget_arrays(self.folder)
        self.screen.close()
        return not self._interrupts.count

    def _find(self, members: Sequence[Member]) -> None:
        """Members that an earlier call has left in the queue; those that have ended are told so.

        Raises:
            LabkitError: Slurm has not ended an element that only a record names.
        """
        named = {member.folder: member for member in members}
        unended = open_elements(self.folder / folder for folder in named)
        known = numbered(self.queue.jobs(jobs=arrays(unended))) if unended else {}
        earlier = {
            number: named[path.name] for number, path in unended.items() if is_ours(path, number)
        }
        # What a record names may be another job of this user's: nothing here follows or ends it.
        strange = {number: path for number, path in unended.items() if number not in earlier}
        check_ended(strange, known)
        for number, path in strange.items():
            self.screen.say(f"{path.name}: element {number} {NOT_OURS}")
        # Of a command that was killed as it submitted them: nobody would release them.
        if held := [number for number, job in known.items() if job.waits and job.reason == HELD]:
            self.queue.cancel(jobs=",".join(held))
            self.screen.say(
                f"{plural(len(held), 'element')} cancelled: held since a submission ended"
            )
        for number, member in earlier.items():
            job = known.get(number)
            if job is None or job.has_ended:
                settle(self.folder / member.folder, job)
            elif number in held:
                over = job._replace(state="CANCELLED")
                settle(self.folder / member.folder, over, "its submission was cut short")
            else:
                self._elements[number] = member
        if self._elements:
            self.screen.say(f"{plural(len(self._elements), 'member')} in Slurm's queue already")

    def _submit(self, members: Sequence[Member]) -> None:
        """Queue an array, held until each of its elements has a record."""
        manifest.keep(self.folder, self.plan)
        # Before any element can begin: they find their members by it.
        manifest.update(self.folder, elements=[member.folder for member in members])
        make_folder(self.folder / SAID, self.folder)
        limit = f"%{self.jobs}" if self.jobs else ""
        element = [sys.executable, "-P", "-m", "labkit.jobs.sweep.element"]
        beside = self.plan.notebook.resolve().parent
        number = self.queue.submit(
            [*element, str(self.folder.resolve()), str(beside)],
            f"--array=0-{len(members) - 1}{limit}",
            f"--job-name={self.folder.name}",
            f"--output={str(self.folder.resolve() / SAID).replace('%', '%%')}/%A_%a.log",
            "--no-requeue",  # a second attempt would write over the first: --resume makes another
            *(shlex.split(self.options) or self._room(members)),
            "--hold",
        )
        try:
            registry.add_array(self.folder, number)
            for place, member in enumerate(members):
                name = f"{number}_{place}"
                self._elements[name] = member
                manifest.queue(self.folder, self.plan, member, element=name)
            self.queue.release(number)
        except BaseException:
            self.queue.cancel(jobs=number)
            raise
        self.screen.say(f"job array {number} of {len(members)} members is in Slurm's queue")

    def _room(self, members: Sequence[Member]) -> list[str]:
        most = max(member.workers for member in members)
        threads = max(member.threads for member in members)
        return [f"--ntasks={most}", f"--cpus-per-task={threads}"]

    def _follow(self) -> None:
        """Look until all elements have ended, or somebody insists."""
        asked_at, told = -ASK_EVERY, ""
        while self._elements and self._interrupts.count < 2:
            if self._interrupts.count and not self._cancelled:
                self._cancel()
            known: dict[str, Job] | None = None
            if time.monotonic() - asked_at >= ASK_EVERY:
                asked_at = time.monotonic()
                known = self._asked()
                waiting = next((job for job in (known or {}).values() if job.waits), None)
                if waiting and (waits := waiting.told) != told:
                    told = waits
                    self.screen.say(told)
            running = {}
            for number, member in list(self._elements.items()):
                status = manifest.status_of(self.folder / member.folder)
                if status.get("state") == "completed" or (
                    known is not None and self._has_ended(number, known.get(number), status)
                ):
                    self._end(number, member, (known or {}).get(number))
                elif status.get("state") == "running":
                    running[member.folder] = elapsed(status) or 0.0
            self._abreast = max(self._abreast, len(running))
            waiting_count = len(self._elements) - len(running)
            self.screen.tick(running, self.screen.left(waiting_count, running, self._abreast))
            if self._elements:
                time.sleep(LOOK_EVERY)

    def _asked(self) -> dict[str, Job] | None:
        """What Slurm says of all arrays; None where it does not answer, which may pass."""
        try:
            return numbered(self.queue.jobs(jobs=arrays(self._elements)))
        except LabkitError as error:
            self.screen.say(f"{error}; the members go on, and are asked for again")
            return None

    def _has_ended(self, number: str, job: Job | None, status: store.Record) -> bool:
        """Whether an element has, and all that it has recorded has come here.

        A folder over a network shows some seconds late what a node has written: who ended without
        a word is asked for once more.
        """
        if job is not None and not job.has_ended:
            return False
        sure = status.get("state") in store.ENDED
        sure = sure or (job is not None and (job.cause != "" or job.reason == NEVER_BEGAN))
        if not sure and number not in self._doubted:
            self._doubted.add(number)
            return False
        return True

    def _end(self, number: str, member: Member, job: Job | None) -> None:
        del self._elements[number]
        folder = self.folder / member.folder
        settle(folder, job, self._interrupts.why)
        self._keep_said(self.folder / SAID / f"{number}.log", folder / LOG)
        status = store.read_status(folder)
        spent = elapsed(status) or 0.0
        rank = f"rank {status['rank']}: " if status["rank"] is not None else ""
        cause = f"{rank}{status['cause']}" if status["cause"] else None
        left = self.screen.left(len(self._elements), {}, self._abreast)
        self.screen.ended(member, status["state"], cause, spent, left)

    def _keep_said(self, said: Path, kept: Path) -> None:
        """Keep what an element has said, but for Slurm's lines: they name nodes."""
        text = read_file(said, root=self.folder) if said.exists() else b""
        lines = text.decode(errors="replace").splitlines()
        if own := [line for line in lines if not line.startswith(OF_SLURM)]:
            make_folder(kept.parent, self.folder)
            store.write_atomically(kept, scrub("\n".join(own) + "\n"))
        said.unlink(missing_ok=True)

    def _cancel(self) -> None:
        """Let Slurm end what is left: each cleans up if it can, within the time Slurm gives it."""
        self._cancelled = True
        self.queue.cancel(jobs=",".join(self._elements))


def arrays(elements: Iterable[str]) -> str:
    """The arrays of elements, as Slurm's commands take them: those of one are asked at once."""
    return ",".join(sorted({number.partition("_")[0] for number in elements}))
