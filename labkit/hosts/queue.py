"""Slurm's queue: the states of jobs and nodes, and the reasons why jobs wait or end."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from labkit.common.errors import LabkitError
from labkit.common.units import plural

# `PENDING_STATES` and `ACTIVE_STATES` contain Slurm's states of a job that has not ended. All
# states outside `PENDING_STATES` and `ACTIVE_STATES` are final, except COMPLETING.
PENDING_STATES = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
ACTIVE_STATES = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"})
UNKNOWN = ("", "N/A", "(null)", "None")
CAUSES: Mapping[str, str] = {
    "TIMEOUT": "the time limit was reached",
    "DEADLINE": "the deadline was reached",
    "OUT_OF_MEMORY": "the job used more memory than Slurm had allocated",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "another job preempted the job",
    "REVOKED": "another cluster has started the job",
    "CANCELLED": "it was cancelled",
}
_UNWELL = re.compile(r"(down|drain|drained|draining|fail|failing|unknown|no_respond)|.*\*")
# Slurm is queried only every `ASK_EVERY` seconds, because many users share Slurm's controller.
ASK_EVERY = 10.0
LIMIT = 30.0  # A Slurm command must return within `LIMIT` seconds.


class SlurmJob(NamedTuple):
    """The state of a Slurm job, or of one task of a job array.

    Attributes:
        number: Job id, such as "12", or "12_3" for an array task.
        state: Slurm's name of the state, such as "PENDING" or "TIMEOUT".
        reason: Reason why the job waits or has ended; "" if Slurm gives no reason.
        start: Actual or expected start time, such as "2026-01-31T09:00:00"; "" if unknown.
        partition: Name of the job's partition.
        position: Number of pending jobs before this job in the partition; None if it was not
            queried.
    """

    number: str
    state: str
    reason: str = ""
    start: str = ""
    partition: str = ""
    position: int | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the job has not started yet."""
        return self.state in PENDING_STATES

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended; Slurm may still clean up after the job."""
        return self.state not in PENDING_STATES | ACTIVE_STATES | {"COMPLETING"}

    @property
    def summary(self) -> str:
        """A text about the job's state, with its position in the queue and its expected start.

        >>> SlurmJob("12", "PENDING", "Resources", "2026-01-31T09:00:00", "all", 2).summary
        'job 12 waits in partition all behind 2 jobs (Resources), to begin at 2026-01-31 09:00:00'
        """
        if not self.is_pending:
            return f"job {self.number} is {self.state.lower().replace('_', ' ')}"
        behind = f" behind {plural(self.position, 'job')}" if self.position else ""
        begin = f", to begin at {self.start.replace('T', ' ')}" if self.start else ""
        return (
            f"job {self.number} waits in partition {self.partition}{behind}"
            f" ({self.reason or 'no reason given'}){begin}"
        )

    @property
    def cause(self) -> str:
        """The reason why Slurm ended the job early; "" if Slurm has not ended the job.

        >>> SlurmJob("12", "TIMEOUT").cause
        'Slurm ended job 12: the time limit was reached'
        """
        if self.state not in CAUSES:
            return ""
        return f"Slurm ended job {self.number}: {CAUSES[self.state]}"


class SlurmNode(NamedTuple):
    """The state of a Slurm node.

    Attributes:
        name: Slurm's name of the node.
        address: Network address of the node.
        state: Slurm's name of the state, such as "idle" or "drained". A trailing * in the state
            means that the node does not answer.
        reason: Why an administrator or Slurm has taken the node out of service; "" if unknown.
    """

    name: str
    address: str
    state: str
    reason: str

    @property
    def trouble(self) -> str:
        """The reason why the node accepts no jobs; "" if the node accepts jobs.

        >>> SlurmNode("b", "10.0.0.2", "completing*", "").trouble
        'node b is completing and does not answer'
        """
        if not _UNWELL.fullmatch(self.state):
            return ""
        answers = " and does not answer" if self.state.endswith("*") else ""
        why = f": {self.reason}" if self.reason else ""
        return f"node {self.name} is {self.state.rstrip('*')}{answers}{why}"


class Queue:
    """An interface to Slurm's queue and jobs, which calls Slurm's command-line programs.

    Args:
        through: Words before each Slurm command, by default none. For example, the words run the
            command on a testbed's login node.

    Raises:
        LabkitError: Slurm is missing, fails or does not answer; every method may raise this error.
    """

    def __init__(self, through: Sequence[str] = ()) -> None:
        self._through = [*through]

    def jobs(self, **which: str) -> list[SlurmJob]:
        """Return the selected jobs that Slurm has a record of, including ended jobs.

        Each task of a job array is a separate job in the list.

        Args:
            which: The jobs to select, by ids (`jobs="12,13"`) or by name (`name="…"`).
        """
        chosen = [f"--{option}={value}" for option, value in which.items()]
        columns = "--format=%i|%T|%r|%S|%P"
        output = self._run("squeue", "--noheader", "--array", "--states=all", columns, *chosen)
        # Slurm's command squeue no longer lists a job that ended some minutes ago.
        if output is None:
            return [*self._accounted(which["jobs"])] if "jobs" in which else []
        return [_job(line) for line in output.splitlines()]

    def with_position(self, job: SlurmJob) -> SlurmJob:
        """Return the job with its position among the pending jobs of its partition."""
        if not job.is_pending:
            return job
        columns = ("--states=PENDING", "--sort=-p,i", "--format=%i")
        output = self._run("squeue", "--noheader", f"--partition={job.partition}", *columns) or ""
        numbers = output.split()
        return job._replace(position=numbers.index(job.number) if job.number in numbers else None)

    def submit(self, command: Sequence[str], *options: str) -> str:
        """Submit a command as a job and return the job's id.

        Args:
            command: Command and arguments.
            options: Options of sbatch; with `--hold`, the job waits until `release` is called.
        """
        wrapped = f"--wrap=exec {shlex.join(command)}"
        return (self._run("sbatch", "--parsable", *options, wrapped) or "").strip().split(";")[0]

    def release(self, number: str) -> None:
        """Release a job that was submitted with `--hold`, so that it may start."""
        self._run("scontrol", "release", number)

    def cancel(self, **which: str) -> None:
        """Cancel jobs, given by `name="…"` or by ids (`jobs="12,12_3"`); ignore ended jobs."""
        words = which["jobs"].split(",") if "jobs" in which else [f"--name={which['name']}"]
        self._run("scancel", "--quiet", *words)

    def nodes(self, partition: str | None = None, named: str | None = None) -> list[SlurmNode]:
        """Return the nodes of a partition, or the nodes with the given names.

        Args:
            partition: Name of the partition; default: Slurm's default partition.
            named: Names of nodes in Slurm's syntax, such as "node[01-04]"; an alternative to
                `partition`.
        """
        filters = {"partition": partition, "nodes": named}
        which = [f"--{option}={value}" for option, value in filters.items() if value]
        output = self._run("sinfo", "--noheader", "--Node", "--format=%N|%o|%T|%P|%E", *which) or ""
        rows = [line.split("|", 4) for line in output.splitlines()]
        return [
            SlurmNode(name, address, state, "" if reason in (*UNKNOWN, "none") else reason.strip())
            for name, address, state, part, reason in rows
            if which or part.endswith("*")
        ]

    def _accounted(self, numbers: str) -> Iterator[SlurmJob]:
        """Yield the jobs with the given ids from Slurm's accounting database, if there is one."""
        columns = "--format=JobID,State,Reason,Start,Partition"
        options = ("--allocations", "--noheader", "--parsable2", columns, f"--jobs={numbers}")
        try:
            output = self._run("sacct", *options) or ""
        except LabkitError:  # The command sacct fails if the cluster has no accounting database.
            return
        for line in output.splitlines():
            yield _job(line)

    def _run(self, *words: str) -> str | None:
        """Run a Slurm command and return its output, or None if Slurm rejects the job id."""
        try:
            result = subprocess.run(
                [*self._through, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except FileNotFoundError:
            raise LabkitError(
                f"the command {words[0]} is not on PATH; start labkit on a login node, which has "
                "Slurm's commands on PATH"
            ) from None
        except subprocess.TimeoutExpired:
            raise LabkitError(f"{words[0]} did not answer within {LIMIT:.0f} s") from None
        if result.returncode == 0:
            return result.stdout
        if "Invalid job id" in result.stderr:
            return None
        errors = result.stderr.strip().splitlines()
        raise LabkitError(
            f"{words[0]}: {errors[-1] if errors else f'exit code {result.returncode}'}"
        )


def _job(line: str) -> SlurmJob:
    number, state, reason, start, partition = line.strip().split("|")
    # Slurm may append a user to the state, as in "CANCELLED by 0". The code uses only the first
    # word of the state.
    reason, start = ("" if value in UNKNOWN else value for value in (reason, start))
    return SlurmJob(number, state.split()[0], reason, start, partition)
