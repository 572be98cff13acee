"""Execution of one notebook as a job: in its own process, with validated parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from labkit.common import imports
from labkit.common.files import read_file
from labkit.common.machine import require_loopback
from labkit.common.privacy import scrub
from labkit.jobs import parameters
from labkit.jobs.fork import Fork
from labkit.jobs.job import CELL_FAILED, LOG
from labkit.records import store
from labkit.records.checkpoints import RESUME_VARIABLE
from labkit.records.endings import describe_exit, interruption_text


@dataclass(frozen=True)
class JobResult:
    """The result of a job: its folder, state (see `store.STATES`), cause and first failed rank."""

    path: Path
    state: str
    cause: str | None = None
    rank: int | None = None


def execute(
    notebook: Path | str,
    parameter_values: parameters.Values | None = None,
    root: Path | str = "runs",
    on_start: Callable[[Path], None] = lambda path: None,
    resume: bool = False,
    show: bool = True,
) -> JobResult:
    """Execute a notebook with parameters as a job `<root>/<notebook>/<NNN>_<k=v,…>/`.

    The terminal shows the output of the notebook as soon as the notebook prints it. The runs of the
    notebook are stored in the job's folder. The environment variable LABKIT_JOB contains the path
    of the job's folder. The notebook runs in the current folder of the caller, as with papermill.
    The job does not change the notebook file itself. The first Ctrl-C interrupts the running cell,
    which can then clean up; a second Ctrl-C kills the job.

    Args:
        notebook: Path of an .ipynb file.
        parameter_values: Parameters by name; text is converted to the declared type of the
            parameter.
        root: Folder of all runs.
        on_start: Function that is called with the job's folder after the job has started.
        resume: Whether to continue the newest job with these parameters, if it was interrupted or
            has failed. Completed runs of the job are not repeated; an incomplete run continues from
            its newest checkpoint.
        show: Whether this process's output also contains the output of the notebook.

    Raises:
        InvalidInput: The parameters violate the notebook's declarations, so no process was started.
    """
    notebook = Path(notebook)
    values = parameters.validate_values(notebook, parameter_values or {})
    require_loopback()
    job = start(notebook, values, root, show, resume)
    on_start(job.path)
    while True:
        try:
            return job.result()
        except KeyboardInterrupt as error:
            # After Ctrl-C, the loop waits for the job's result, because an interrupted job also
            # writes a record.
            job.interrupt(interruption_text(error))


class NotebookJob:
    """A notebook that is executed in a separate process.

    Args:
        path: Folder of the job.
        process: Process that executes the notebook; the process ends when its standard input is
            closed.

    Attributes:
        interrupted: Cause of the interruption; None if the job was not interrupted.
    """

    def __init__(self, path: Path, process: subprocess.Popen[bytes] | Fork) -> None:
        self.path, self.process = path, process
        self.interrupted: str | None = None

    def done(self) -> bool:
        """Return whether the process of the job has ended."""
        return self.process.poll() is not None

    @property
    def in_order(self) -> bool:
        """Whether the notebook ended by itself, so that none of its ranks still computes."""
        return self.process.poll() in (0, CELL_FAILED)

    def interrupt(self, cause: str = "interrupted by the user") -> None:
        """Interrupt the running cell, which may clean up; a second call kills the process."""
        if self.interrupted:
            self.kill(self.interrupted)
        else:
            self.interrupted = cause
            # The assertion tells the type checker that Popen has created a pipe.
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # The pipe is broken if the process is ending.
                os.write(self.process.stdin.fileno(), cause.encode())
            self._close()

    def kill(self, cause: str) -> None:
        """Kill the process of the job; its kernel detects the end and exits."""
        self.interrupted = cause
        self.process.kill()

    def result(self) -> JobResult:
        """Wait until the process has ended, and return the result that it recorded.

        If the process could not record how it ended, this method records the cause and the exit
        code.
        """
        code = self.process.wait()
        self._close()
        # The code reads `status.json` directly, because `read_status` reports every dead process as
        # interrupted.
        status = store.read_json(self.path / "status.json")
        is_unfinished = status["state"] in ("queued", "running")
        if is_unfinished and not store.fallback_status(self.path, status):
            if self.interrupted:
                store.interrupt(self.path, self.interrupted)
            else:
                store.fail(self.path, describe_exit("the process of the notebook", code).message)
        if code < 0:  # a killed process could not record the ends of its runs
            store.end_orphans(self.path, store.read_status(self.path)["cause"])
        _clean_log(self.path / LOG)
        status = store.read_status(self.path)
        return JobResult(self.path, status["state"], status["cause"], status["rank"])

    def _close(self) -> None:
        # The assertion tells the type checker that Popen has created a pipe.
        assert self.process.stdin is not None
        self.process.stdin.close()


def start(
    notebook: Path,
    values: parameters.Values,
    root: Path | str,
    show: bool = True,
    resume: bool = False,
) -> NotebookJob:
    """Execute a notebook in a new process, in a new folder inside the folder of all runs.

    Args:
        notebook: Path of an .ipynb file.
        values: Validated values of the parameters.
        root: Folder of all runs.
        show: Whether this process's output also contains the output of the notebook.
        resume: Whether to continue an unfinished job, as in `execute`.
    """
    unfinished = store.unfinished_job(root, notebook, values) if resume else None
    path = unfinished or store.new_job_directory(root, notebook, values)
    # The job's output is discarded, because no process would read a pipe. A full pipe would block
    # the notebook.
    output = None if show else subprocess.DEVNULL
    job_environment = {
        "LABKIT_JOB": str(path.resolve()),
        imports.VARIABLE: imports.notebook_folders(notebook),
    }
    # With the option -P, Python does not import modules from the caller's folder. The job runs in
    # its own session, so Ctrl-C reaches only the starting process. After Ctrl-C, the starting
    # process closes the pipe to the job. If the starting process is killed, the system closes the
    # pipe, so the job also ends.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.jobs.job", str(notebook), str(path)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=os.environ | job_environment | ({RESUME_VARIABLE: "1"} if unfinished else {}),
        start_new_session=True,
    )
    return NotebookJob(path, process)


def _clean_log(log: Path) -> None:
    """Remove this machine's paths from the log of a process; delete an empty log."""
    try:
        text = read_file(log, root=log.parents[1]).decode(errors="replace")
    except FileNotFoundError:
        return
    if text.strip():
        store.write_atomically(log, scrub(text))
    else:
        log.unlink()
