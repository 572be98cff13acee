"""Members start as cores become free, end as they end, and the next ones follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.common import imports
from labkit.common.paths import usable_cores
from labkit.jobs.interrupts import Interrupts
from labkit.jobs.job import GRACE, forked, prepare
from labkit.jobs.notebook import Job
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep.plan import Member, Plan
from labkit.jobs.sweep.screen import Screen
from labkit.jobs.sweep.trials import Trials
from labkit.jobs.sweep.warm import Warm

LOOK_EVERY = 0.02  # seconds
OVERTIME = GRACE + 10.0  # seconds past its limit after which a member's process is killed


@dataclass
class Running:
    """A member at work, at its place among those that run abreast."""

    member: Member
    place: int
    job: Job
    begin: float

    @property
    def spent(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.begin


class Scheduler:
    """Runs members of a plan, at most so many at a time as cores allow.

    Args:
        plan: of the sweep.
        folder: of the sweep.
        jobs: run so many at a time, whatever the cores; None: ranks × threads of all that run fit
            the cores, or one runs alone, as does one whose ranks nobody knows.
        limit: seconds that a member may take.
        screen: is told what happens.
    """

    def __init__(
        self, plan: Plan, folder: Path, jobs: int | None, limit: float | None, screen: Screen
    ) -> None:
        self.plan, self.folder, self.jobs, self.limit = plan, folder, jobs, limit
        self.screen = screen
        self._notebook = manifest.keep(folder, plan)
        self._running: list[Running] = []
        self._most = 1  # members that ran abreast
        self._interrupts = Interrupts(
            lambda: screen.say("interrupted: the members that run may clean up (again: kill)")
        )
        self._trials: Trials | None = None
        self._warm = Warm()

    def run(self, members: Sequence[Member], trials: Trials | None = None) -> bool:
        """Run these members, and those that a search asks for then; whether it came to its end
        without being interrupted.

        Members of one shape follow each other, so that they find their cluster up.
        """
        shapes = list(dict.fromkeys(member.shape for member in members))
        waiting = sorted(members, key=lambda member: shapes.index(member.shape))
        self._trials = trials
        with self._interrupts:
            if members or self._to_ask:
                prepare()
            while self._running or ((waiting or self._to_ask) and not self._interrupts.count):
                while not self._interrupts.count and self._next_fits(waiting):
                    self._start(waiting.pop(0))
                time.sleep(LOOK_EVERY)
                # Also while nothing can start: the screen counts seconds.
                self._look(waiting)
        self._warm.keep(set())
        self.screen.close()
        return not self._interrupts.count

    @property
    def _to_ask(self) -> int:
        """Members that a search has not asked for yet."""
        return self._trials.left if self._trials else 0

    def _next_fits(self, waiting: list[Member]) -> bool:
        """Whether the next member may start; a search is asked for it as late as can be."""
        if not waiting and self._trials and self._trials.left and self._has_room():
            waiting.append(self._trials.ask())
        return bool(waiting) and self._fits(waiting[0])

    def _has_room(self) -> bool:
        """Whether a member of one core could start."""
        return self._fits(Member("", {}, 0, workers=1, threads=1))

    def _fits(self, member: Member) -> bool:
        if self.jobs is not None:
            return len(self._running) < self.jobs
        wanted = [each.cores for each in (member, *(other.member for other in self._running))]
        known = [each for each in wanted if each is not None]
        return len(wanted) == 1 or (len(known) == len(wanted) and sum(known) <= usable_cores())

    def _start(self, member: Member) -> None:
        folder = manifest.queue(self.folder, self.plan, member)
        taken = {running.place for running in self._running}
        # The lowest free place: its cluster is the likeliest to be up.
        place = min(set(range(len(taken) + 1)) - taken)
        held = self._warm.environment(place, member.shape)
        held |= {imports.VARIABLE: str(self.plan.notebook.resolve().parent)}
        process = forked(self._notebook, folder, held, self.limit)
        self._running.append(Running(member, place, Job(folder, process), time.monotonic()))
        self._most = max(self._most, len(self._running))

    def _look(self, waiting: list[Member]) -> None:
        for running in list(self._running):
            if running.job.done():
                self._running.remove(running)
                self._end(running, waiting)
            elif self._interrupts.count and not running.job.interrupted:
                running.job.interrupt(self._interrupts.why)
            elif self._interrupts.count > 1:
                # The second interrupt: whoever was asked before has had his chance.
                running.job.kill(f"{self._interrupts.why} twice, and killed")
            elif self.limit is not None and running.spent > self.limit + OVERTIME:
                running.job.kill(f"past the limit of {self.limit:g} s, and killed")
            elif self._trials:
                self._trials.watch(running.member)
        spent = self._spent()
        self.screen.tick(spent, self.screen.left(len(waiting) + self._to_ask, spent, self._most))

    def _end(self, running: Running, waiting: list[Member]) -> None:
        result = running.job.result()
        if not running.job.in_order:
            # Ranks may still compute for a notebook that did not end in order; the next member gets
            # others.
            self._warm.drop(running.place, running.member.shape)
        # A shape that nobody waits for any more gives its cores back at once.
        active = [*waiting, *(other.member for other in self._running)]
        if not self._to_ask:  # a search may ask for any shape again
            self._warm.keep({member.shape for member in active})
        rank = f"rank {result.rank}: " if result.rank is not None else ""
        cause = f"{rank}{result.cause}" if result.cause else None
        left = self.screen.left(len(waiting) + self._to_ask, self._spent(), self._most)
        self.screen.ended(running.member, result.state, cause, running.spent, left)
        if self._trials and (wrong := self._trials.tell(running.member, result.state)):
            self.screen.say(wrong)

    def _spent(self) -> dict[str, float]:
        return {running.member.folder: running.spent for running in self._running}
