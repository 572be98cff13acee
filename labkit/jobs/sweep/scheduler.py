"""A scheduler that starts a sweep's notebook runs on this machine when cores become free."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.cluster.lease import HOLD, Hold, Lock
from labkit.common import imports
from labkit.common.files import runtime_folder, usable_cores
from labkit.jobs.job import GRACE, forked, prepare
from labkit.jobs.notebook import NotebookJob
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep.progress_screen import Interrupts, SweepScreen
from labkit.jobs.sweep.sweep_plan import SweepMember, SweepPlan
from labkit.jobs.sweep.trials import Trials

Shape = tuple[int, int]


class ClusterPool:
    """Leases that keep clusters running, so that several notebook runs of a sweep use them.

    Each lease belongs to a slot (a place for one simultaneous notebook run) and a pair (workers,
    threads). `Cluster(workers=…)` in a notebook run finds the lease in an environment variable.
    Simultaneous notebook runs use separate clusters. Later notebook runs reuse the clusters.
    """

    def __init__(self) -> None:
        _remove_old_clusters()
        self._holds: dict[tuple[int, Shape], Hold] = {}

    def environment(self, place: int, shape: Shape) -> dict[str, str]:
        """Return an environment variable with the path of the lease of a slot and cluster shape."""
        if (place, shape) not in self._holds:
            self._holds[place, shape] = Hold()
        return {HOLD: str(self._holds[place, shape].path)}

    def release(self, place: int, shape: Shape) -> None:
        """End the lease of a cluster, so that the cluster can stop."""
        if hold := self._holds.pop((place, shape), None):
            hold.release()

    def release_others(self, shapes: set[Shape]) -> None:
        """End the leases of all clusters whose shape is not among `shapes`."""
        for place, shape in list(self._holds):
            if shape not in shapes:
                self.release(place, shape)


def _remove_old_clusters() -> None:
    """Remove the folders of ended clusters that earlier sweeps have leased."""
    for path in runtime_folder("holds").iterdir():
        if _is_free(path):
            folders = list(runtime_folder("clusters").glob(f"*-{path.name}"))
            ended = [folder for folder in folders if _is_free(folder / "keeper.lock")]
            for folder in ended:
                shutil.rmtree(folder)
            if ended == folders:
                path.unlink(missing_ok=True)


def _is_free(path: Path) -> bool:
    lock = Lock(path)
    try:
        return not lock.is_held()
    finally:
        lock.release()


LOOK_EVERY = 0.02  # seconds between two checks of the notebook runs
OVERTIME = GRACE + 10.0  # Labkit kills a notebook process OVERTIME seconds after the time limit.


@dataclass
class Running:
    """A notebook run in progress; `place` is the number of its slot among simultaneous runs."""

    member: SweepMember
    place: int
    job: NotebookJob
    begin: float

    @property
    def spent(self) -> float:
        """The seconds since the start of the notebook run."""
        return time.monotonic() - self.begin


class Scheduler:
    """A runner for a sweep's notebook runs, with as many at the same time as the cores allow.

    Args:
        plan: Plan of the sweep.
        folder: Folder of the sweep.
        jobs: Maximum number of simultaneous notebook runs, independent of the number of cores.
            None: The number of cores on this machine limits the simultaneous notebook runs. Each
                notebook run needs ranks × threads cores. A notebook run that needs more than all
                cores, or an unknown number of ranks, runs alone.
        limit: Time limit of a notebook run in seconds; None for no limit.
        screen: Display for progress lines.
        retries: Number of further attempts after the failure of a notebook run. An interrupted
            notebook run is not repeated, also not after its time limit.
    """

    def __init__(
        self,
        plan: SweepPlan,
        folder: Path,
        jobs: int | None,
        limit: float | None,
        screen: SweepScreen,
        retries: int = 0,
    ) -> None:
        self.plan, self.folder, self.jobs, self.limit = plan, folder, jobs, limit
        self.screen, self.retries = screen, retries
        self._attempts: Counter[str] = Counter()
        self._notebook = manifest.save_notebook(folder, plan)
        self._running: list[Running] = []
        # The attribute `_most` is the largest number of notebook runs that were in progress at the
        # same time.
        self._most = 1
        self._interrupts = Interrupts(
            lambda: screen.say(
                "interrupted: running notebooks may clean up (Ctrl-C again: kill them)"
            )
        )
        self._trials: Trials | None = None
        self._clusters = ClusterPool()

    def run(self, members: Sequence[SweepMember], trials: Trials | None = None) -> bool:
        """Execute notebook runs, also those of a search; return False if the user interrupts.

        Notebook runs with equal numbers of ranks and threads are executed in sequence. Notebook
        runs in sequence reuse one cluster.
        """
        shapes = list(dict.fromkeys(member.shape for member in members))
        waiting = sorted(members, key=lambda member: shapes.index(member.shape))
        self._trials = trials
        with self._interrupts:
            if members or self._members_to_ask:
                prepare()
            while self._running or (
                (waiting or self._members_to_ask) and not self._interrupts.count
            ):
                while not self._interrupts.count and self._next_fits(waiting):
                    self._start(waiting.pop(0))
                time.sleep(LOOK_EVERY)
                self._look(waiting)
        self._clusters.release_others(set())
        self.screen.close()
        return not self._interrupts.count

    @property
    def _members_to_ask(self) -> int:
        """The number of notebook runs that a search will still create; 0 without a search."""
        return self._trials.left if self._trials else 0

    def _next_fits(self, waiting: list[SweepMember]) -> bool:
        """Return whether the next notebook run may start; a search creates it if none waits."""
        if not waiting and self._trials and self._trials.left and self._has_room():
            waiting.append(self._trials.ask())
        return bool(waiting) and self._fits(waiting[0])

    def _has_room(self) -> bool:
        """Return whether a notebook run that needs only one core could start."""
        return self._fits(SweepMember("", {}, 0, workers=1, threads=1))

    def _fits(self, member: SweepMember) -> bool:
        if self.jobs is not None:
            return len(self._running) < self.jobs
        cores_of_members = [
            candidate.cores
            for candidate in (member, *(running.member for running in self._running))
        ]
        known_cores = [cores for cores in cores_of_members if cores is not None]
        return len(cores_of_members) == 1 or (
            len(known_cores) == len(cores_of_members) and sum(known_cores) <= usable_cores()
        )

    def _start(self, member: SweepMember) -> None:
        folder = manifest.queue(self.folder, self.plan, member)
        self._attempts[member.folder] += 1
        used_slots = {running.place for running in self._running}
        # A notebook run gets the lowest free slot. A cluster most likely still runs in the lowest
        # slots.
        slot = min(set(range(len(used_slots) + 1)) - used_slots)
        environment = self._clusters.environment(slot, member.shape)
        environment |= {imports.VARIABLE: imports.notebook_folders(self.plan.notebook)}
        process = forked(self._notebook, folder, environment, self.limit)
        self._running.append(Running(member, slot, NotebookJob(folder, process), time.monotonic()))
        self._most = max(self._most, len(self._running))

    def _look(self, waiting: list[SweepMember]) -> None:
        for running in list(self._running):
            if running.job.done():
                self._running.remove(running)
                self._end(running, waiting)
            elif self._interrupts.count and not running.job.interrupted:
                running.job.interrupt(self._interrupts.why)
            elif self._interrupts.count > 1:
                running.job.kill(f"{self._interrupts.why} twice, then killed")
            elif self.limit is not None and running.spent > self.limit + OVERTIME:
                running.job.kill(f"stopped at the time limit of {self.limit:g} s, then killed")
            elif self._trials:
                self._trials.watch(running.member)
        seconds = self._spent()
        self.screen.tick(
            seconds,
            self.screen.remaining_time(len(waiting) + self._members_to_ask, seconds, self._most),
        )

    def _end(self, running: Running, waiting: list[SweepMember]) -> None:
        result, member = running.job.result(), running.member
        attempt, attempts = self._attempts[member.folder], self.retries + 1
        again = result.state == "failed" and attempt < attempts
        if again:
            waiting.append(member)
        if not running.job.in_order:
            # After an abnormal end of a notebook, its ranks may still compute. The next notebook
            # run therefore gets another cluster.
            self._clusters.release(running.place, member.shape)
        # Each cluster has fixed numbers of workers and threads. If no remaining notebook run fits a
        # cluster, the cluster is released. The release of a cluster frees its cores.
        needed = [*waiting, *(other.member for other in self._running)]
        # A search may still create notebook runs that need any of the clusters. Labkit therefore
        # keeps all clusters during the search.
        if not self._members_to_ask:
            self._clusters.release_others({member.shape for member in needed})
        rank = f"rank {result.rank}: " if result.rank is not None else ""
        cause = f"{rank}{result.cause}" if result.cause else None
        remaining_text = self.screen.remaining_time(
            len(waiting) + self._members_to_ask, self._spent(), self._most
        )
        if again:
            self.screen.say(
                f"{member.folder}: attempt {attempt} of {attempts} failed: {cause}; it runs again"
            )
            return
        self.screen.ended(member, result.state, cause, running.spent, remaining_text)
        if self._trials and (wrong := self._trials.tell(member, result.state)):
            self.screen.say(wrong)

    def _spent(self) -> dict[str, float]:
        return {running.member.folder: running.spent for running in self._running}
