"""One notebook as a job: checked, executed in a process of its own, recorded honestly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.jobs import parameters
from labkit.records import store


@dataclass(frozen=True)
class JobResult:
    """How a job ended: its record's folder, state (store.STATES), cause and first failing rank."""

    path: Path
    state: str
    cause: str | None = None
    rank: int | None = None


def execute(
    notebook: Path | str, given: Mapping[str, Any] | None = None, root: Path | str = "runs"
) -> JobResult:
    """Execute a notebook with these parameters as a job `<root>/<notebook>/<NNN>_<k=v,…>/`.

    Its output shows in the terminal as it comes; its runs lie in the job's folder (LABKIT_JOB). It
    works in the caller's folder, as papermill does. The notebook itself is never changed. Ctrl-C
    interrupts the cell that runs and so lets it clean up; a second one ends the job at once.

    Args:
        notebook: path of an .ipynb file.
        given: parameters; texts are converted to the declared types.
        root: folder of all runs.

    Raises:
        InvalidInput: the parameters break the notebook's contract; nothing was started.
    """
    notebook = Path(notebook)
    job = Job(notebook, parameters.check(notebook, given or {}), root)
    while True:
        try:
            return job.result()
        except KeyboardInterrupt:
            job.interrupt()


class Job:
    """A notebook that executes in a process of its own.

    Args:
        notebook: path of an .ipynb file.
        values: parameters, checked.
        root: folder of all runs.
        shown: whether its output shows where that of this process does.

    Attributes:
        path: the job's folder.
    """

    def __init__(
        self, notebook: Path, values: Mapping[str, Any], root: Path | str, shown: bool = True
    ) -> None:
        self.path = store.new_job_directory(root, notebook, values)
        # -P: no file beside the caller may stand in for a module. A session of its own: Ctrl-C in
        # the terminal reaches this process alone, which passes it on by closing the pipe; the pipe
        # also closes when this process is killed, so that no job is left behind.
        output = None if shown else subprocess.DEVNULL
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "labkit.jobs.job", str(notebook), str(self.path)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=os.environ | {"LABKIT_JOB": str(self.path.resolve())},
            start_new_session=True,
        )
        self._interrupts = 0

    def done(self) -> bool:
        """Whether it has ended."""
        return self._child.poll() is not None

    def interrupt(self) -> None:
        """Let the cell that runs clean up, and then end; the second time, end at once."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._close()
        else:
            self._child.kill()

    def result(self) -> JobResult:
        """Wait for its end."""
        code = self._child.wait()
        self._close()
        return settle(self.path, code, "interrupted by the user" if self._interrupts else None)

    def _close(self) -> None:
        assert self._child.stdin is not None  # for the type checker: a pipe was asked for
        self._child.stdin.close()


def settle(job: Path, code: int, interrupted: str | None) -> JobResult:
    """Read the record that a job left; where it could not write one, write what is known.

    Args:
        job: its folder.
        code: exit code of the process that executed it, which has ended.
        interrupted: by what, if it was.
    """
    if store.read_json(job / "status.json")["state"] in ("queued", "running"):
        if interrupted:
            store.interrupt(job, interrupted)
        else:
            store.fail(job, f"the process that executed the notebook ended with code {code}")
    status = store.read_status(job)
    return JobResult(job, status["state"], status["cause"], status["rank"])
