"""Slurm's queue: what a job waits for, where it stands, and why it has ended."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from labkit.common.errors import LabkitError
from labkit.common.units import plural

# What Slurm calls a job that has not ended; all other states are final.
WAITS = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
GOES_ON = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"})
UNKNOWN = ("", "N/A", "(null)", "None")
# Why Slurm ends a job, by the state that it gives it.
CAUSES: Mapping[str, str] = {
    "TIMEOUT": "its time limit was reached",
    "DEADLINE": "its deadline was reached",
    "OUT_OF_MEMORY": "it took more memory than it was given",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "another job took its place",
    "REVOKED": "another cluster has it",
    "CANCELLED": "it was cancelled",
}
_UNWELL = re.compile(r"(down|drain|drained|draining|fail|failing|unknown|no_respond)|.*\*")
ASK_EVERY = 10.0  # seconds between two questions: a controller serves many
LIMIT = 30.0  # seconds that an answer may take


class Job(NamedTuple):
    """What Slurm says of a job, or of one element of an array.

    Attributes:
        number: such as "12", or "12_3".
        state: in Slurm's word, such as "PENDING" or "TIMEOUT".
        reason: why it waits, or has ended; "" where Slurm gives none.
        start: when it began, or is expected to, "2026-01-31T09:00:00"; "" where nobody knows.
        place: how many waiting jobs come before it in its partition; None unless it was asked for.
    """

    number: str
    state: str
    reason: str = ""
    start: str = ""
    partition: str = ""
    place: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it has not begun."""
        return self.state in WAITS

    @property
    def has_ended(self) -> bool:
        """Whether Slurm is through with it, but for tidying up."""
        return self.state not in WAITS | GOES_ON | {"COMPLETING"}

    @property
    def told(self) -> str:
        """One sentence part for whoever waits: what for, behind how many, until when.

        >>> Job("12", "PENDING", "Resources", "2026-01-31T09:00:00", "all", 2).told
        'job 12 waits in partition all behind 2 jobs (Resources), to begin at 2026-01-31 09:00:00'
        """
        if not self.waits:
            return f"job {self.number} is {self.state.lower().replace('_', ' ')}"
        behind = f" behind {plural(self.place, 'job')}" if self.place else ""
        begin = f", to begin at {self.start.replace('T', ' ')}" if self.start else ""
        return (
            f"job {self.number} waits in partition {self.partition}{behind}"
            f" ({self.reason or 'no reason given'}){begin}"
        )

    @property
    def cause(self) -> str:
        """Why it has ended before its time; "" where it has not, or ended by itself.

        >>> Job("12", "TIMEOUT").cause
        'Slurm ended job 12: its time limit was reached'
        """
        if self.state not in CAUSES:
            return ""
        return f"Slurm ended job {self.number}: {CAUSES[self.state]}"


class Node(NamedTuple):
    """What Slurm says of a node.

    Attributes:
        name: as Slurm has it.
        address: by which it is reached.
        state: in Slurm's word, such as "idle" or "drained"; * behind it: it does not answer.
        reason: why it takes no jobs, as who has drained it wrote; "" where Slurm has none.
    """

    name: str
    address: str
    state: str
    reason: str

    @property
    def trouble(self) -> str:
        """Why it takes no jobs; "" where it does.

        >>> Node("b", "10.0.0.2", "completing*", "").trouble
        'node b is completing and does not answer'
        """
        if not _UNWELL.fullmatch(self.state):
            return ""
        answers = " and does not answer" if self.state.endswith("*") else ""
        why = f": {self.reason}" if self.reason else ""
        return f"node {self.name} is {self.state.rstrip('*')}{answers}{why}"


class Queue:
    """Slurm's commands, carried out here or through another command.

    Args:
        through: words before each command, such as those of a testbed's login node.

    Raises:
        LabkitError: in each method: Slurm is not there or does not answer, with what it said.
    """

    def __init__(self, through: Sequence[str] = ()) -> None:
        self._through = [*through]

    def jobs(self, **which: str) -> list[Job]:
        """The jobs that Slurm still knows, by `jobs="12,13"` or by `name="…"`; ended ones as well.

        Elements of an array stand one by one.
        """
        chosen = [f"--{option}={value}" for option, value in which.items()]
        columns = "--format=%i|%T|%r|%S|%P"
        said = self._ask("squeue", "--noheader", "--array", "--states=all", columns, *chosen)
        if said is None:  # Slurm has forgotten it: some minutes after its end
            return [*self._accounted(which["jobs"])] if "jobs" in which else []
        return [_job(line) for line in said.splitlines()]

    def placed(self, job: Job) -> Job:
        """The job with its place among those that wait in its partition."""
        if not job.waits:
            return job
        columns = ("--states=PENDING", "--sort=-p,i", "--format=%i")
        said = self._ask("squeue", "--noheader", f"--partition={job.partition}", *columns) or ""
        numbers = said.split()
        return job._replace(place=numbers.index(job.number) if job.number in numbers else None)

    def submit(self, command: Sequence[str], *options: str) -> str:
        """Queue a command as a job; its number. `options` are sbatch's.

        A job that is held, by `--hold`, waits for its `release`.
        """
        wrapped = f"--wrap=exec {shlex.join(command)}"
        return (self._ask("sbatch", "--parsable", *options, wrapped) or "").strip().split(";")[0]

    def release(self, number: str) -> None:
        """Let a held job begin."""
        self._ask("scontrol", "release", number)

    def cancel(self, **which: str) -> None:
        """End jobs by `name="…"` or `jobs="12,12_3"`; those that have ended stay so."""
        words = which["jobs"].split(",") if "jobs" in which else [f"--name={which['name']}"]
        self._ask("scancel", "--quiet", *words)

    def nodes(self, partition: str | None = None, named: str | None = None) -> list[Node]:
        """The nodes of a partition, or some by their names.

        Args:
            partition: whose; default: Slurm's default.
            named: these ones instead, as Slurm writes them: "node[01-04]".
        """
        given = {"partition": partition, "nodes": named}
        which = [f"--{option}={value}" for option, value in given.items() if value]
        said = self._ask("sinfo", "--noheader", "--Node", "--format=%N|%o|%T|%P|%E", *which) or ""
        rows = [line.split("|", 4) for line in said.splitlines()]
        return [
            Node(name, address, state, "" if reason in (*UNKNOWN, "none") else reason.strip())
            for name, address, state, part, reason in rows
            if which or part.endswith("*")
        ]

    def _accounted(self, numbers: str) -> Iterator[Job]:
        """What accounting kept, where a site has it."""
        columns = "--format=JobID,State,Reason,Start,Partition"
        options = ("--allocations", "--noheader", "--parsable2", columns, f"--jobs={numbers}")
        try:
            said = self._ask("sacct", *options) or ""
        except LabkitError:  # no accounting on this site
            return
        for line in said.splitlines():
            yield _job(line)

    def _ask(self, *words: str) -> str | None:
        """What Slurm answers; None where it says that it does not know this job."""
        try:
            done = subprocess.run(
                [*self._through, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except FileNotFoundError:
            raise LabkitError(
                f"there is no {words[0]} here: Slurm's commands belong on a login node's PATH"
            ) from None
        except subprocess.TimeoutExpired:
            raise LabkitError(f"{words[0]} did not answer within {LIMIT:.0f} s") from None
        if done.returncode == 0:
            return done.stdout
        if "Invalid job id" in done.stderr:
            return None
        said = done.stderr.strip().splitlines()
        raise LabkitError(f"{words[0]}: {said[-1] if said else f'exit code {done.returncode}'}")


def _job(line: str) -> Job:
    number, state, reason, start, partition = line.strip().split("|")
    # Accounting adds by whom: "CANCELLED by 0".
    reason, start = ("" if value in UNKNOWN else value for value in (reason, start))
    return Job(number, state.split()[0], reason, start, partition)
