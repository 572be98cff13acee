"""Execution of one notebook as a job: in a separate process, with validated parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from labkit.common import imports
from labkit.common.machine import require_loopback
from labkit.common.privacy import scrub
from labkit.common.safe_files import read_file
from labkit.jobs import parameters
from labkit.jobs.fork import Fork
from labkit.jobs.job import CELL_FAILED, LOG
from labkit.records import store
from labkit.records.checkpoints import RESUME_VARIABLE
from labkit.records.endings import describe_exit, interruption_text


@dataclass(frozen=True)
class JobResult:
    """The result of a job: its folder, state (store.STATES), cause and first failing rank."""

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
) -> JobResult:
    """Execute a notebook with these parameters as a job `<root>/<notebook>/<NNN>_<k=v,…>/`.

    The terminal shows the output as it arrives. The runs are stored in the job's folder
    (LABKIT_JOB). As with papermill, the working folder is the caller's folder. The notebook file
    itself never changes. Ctrl-C interrupts the running cell, which can clean up; a second Ctrl-C
    kills the job.

    Args:
        notebook: Path of an .ipynb file.
        parameter_values: Parameters by name; texts are converted to the declared types.
        root: Folder of all runs.
        on_start: Function that receives the job's folder when the job has started.
        resume: Whether to continue the newest job with these parameters, if that job was
            interrupted or failed. Completed runs are not repeated; an incomplete run continues from
            its newest checkpoint.

    Raises:
        InvalidInput: The parameters violate the notebook's declarations; no process was started.
    """
    notebook = Path(notebook)
    values = parameters.validate_values(notebook, parameter_values or {})
    require_loopback()
    job = start(notebook, values, root, resume=resume)
    on_start(job.path)
    while True:
        try:
            return job.result()
        except KeyboardInterrupt as error:
            # The loop continues, because an interrupted job also writes a record.
            job.interrupt(interruption_text(error))


class NotebookJob:
    """A notebook that executes in a separate process.

    Args:
        path: Folder of the job.
        process: Process that executes the notebook; it ends when its standard input closes.

    Attributes:
        interrupted: Cause of the interruption; None: the job was not interrupted.
    """

    def __init__(self, path: Path, process: subprocess.Popen[bytes] | Fork) -> None:
        self.path, self.process = path, process
        self.interrupted: str | None = None

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self.process.poll() is not None

    @property
    def in_order(self) -> bool:
        """Whether the notebook ended by itself, so that no rank still computes for it."""
        return self.process.poll() in (0, CELL_FAILED)

    def interrupt(self, cause: str = "interrupted by the user") -> None:
        """Interrupt the running cell, which can clean up; a second call kills the process."""
        if self.interrupted:
            self.kill(self.interrupted)
        else:
            self.interrupted = cause
            assert self.process.stdin is not None  # for the type checker: the call requests a pipe
            with suppress(BrokenPipeError):  # the process has ended at this moment
                os.write(self.process.stdin.fileno(), cause.encode())
            self._close()

    def kill(self, cause: str) -> None:
        """Kill the process; its kernel detects this and ends."""
        self.interrupted = cause
        self.process.kill()

    def result(self) -> JobResult:
        """Wait for the end of the process, and return its recorded result.

        If the process could not record how it ended, this method records what is known.
        """
        code = self.process.wait()
        self._close()
        # The file is read directly: `read_status` would report every dead process as interrupted.
        status = store.read_json(self.path / "status.json")
        is_unfinished = status["state"] in ("queued", "running")
        if is_unfinished and not store.fallback_status(self.path, status):
            if self.interrupted:
                store.interrupt(self.path, self.interrupted)
            else:
                store.fail(self.path, describe_exit("the process of the notebook", code).message)
        if code < 0:  # a killed process has not recorded the ends of its runs
            store.end_orphans(self.path, store.read_status(self.path)["cause"])
        _clean_log(self.path / LOG)
        status = store.read_status(self.path)
        return JobResult(self.path, status["state"], status["cause"], status["rank"])

    def _close(self) -> None:
        assert self.process.stdin is not None  # for the type checker: the call requests a pipe
        self.process.stdin.close()


def start(
    notebook: Path,
    values: parameters.Values,
    root: Path | str,
    show: bool = True,
    resume: bool = False,
) -> NotebookJob:
    """Execute a notebook in a new process, in a new folder below the folder of all runs.

    Args:
        notebook: Path of an .ipynb file.
        values: Validated parameters.
        root: Folder of all runs.
        show: Whether the notebook's output also goes to the output of this process.
        resume: Whether to continue an unfinished job, see `execute`.
    """
    unfinished = store.unfinished_job(root, notebook, values) if resume else None
    path = unfinished or store.new_job_directory(root, notebook, values)
    # The output is not a pipe: no process would read it, and a full pipe blocks the notebook.
    output = None if show else subprocess.DEVNULL
    job_environment = {
        "LABKIT_JOB": str(path.resolve()),
        imports.VARIABLE: imports.notebook_folders(notebook),
    }
    # With -P, no file in the caller's folder can replace a module. In a separate session, the job
    # does not receive Ctrl-C; this process receives it and closes the pipe to the job. The pipe
    # also closes when this process is killed, so that no job remains.
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
    """Remove paths of this machine from the log of a process; delete an empty log."""
    try:
        text = read_file(log, root=log.parents[1]).decode(errors="replace")
    except FileNotFoundError:
        return
    if text.strip():
        store.write_atomically(log, scrub(text))
    else:
        log.unlink()
