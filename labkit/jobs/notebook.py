"""One notebook as a job: checked, executed in a process of its own, recorded honestly."""

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
from labkit.records.checkpoints import RESUMES
from labkit.records.endings import by_whom, described


@dataclass(frozen=True)
class JobResult:
    """How a job ended: its record's folder, state (store.STATES), cause and first failing rank."""

    path: Path
    state: str
    cause: str | None = None
    rank: int | None = None


def execute(
    notebook: Path | str,
    given: parameters.Values | None = None,
    root: Path | str = "runs",
    begun: Callable[[Path], None] = lambda path: None,
    resume: bool = False,
) -> JobResult:
    """Execute a notebook with these parameters as a job `<root>/<notebook>/<NNN>_<k=v,…>/`.

    Its output shows in the terminal as it comes; its runs lie in the job's folder (LABKIT_JOB). It
    works in the caller's folder, as papermill does. The notebook itself is never changed. Ctrl-C
    interrupts the cell that runs and so lets it clean up; a second one ends the job at once.

    Args:
        notebook: path of an .ipynb file.
        given: parameters; texts are converted to the declared types.
        root: folder of all runs.
        begun: told the job's folder at its start.
        resume: in the folder of the newest job with these parameters, if it was interrupted or
            failed: what it has run is not run again, and what was broken off goes on from its
            newest checkpoint.

    Raises:
        InvalidInput: the parameters break the notebook's contract; nothing was started.
    """
    notebook = Path(notebook)
    values = parameters.check(notebook, given or {})
    require_loopback()
    job = start(notebook, values, root, resume=resume)
    begun(job.path)
    while True:
        try:
            return job.result()
        except KeyboardInterrupt as error:
            # The loop goes on: the record of an interrupted job is waited for, too.
            job.interrupt(by_whom(error))


class Job:
    """A notebook that executes in a process of its own.

    Args:
        path: the job's folder.
        process: executes it; it ends when its input does.

    Attributes:
        interrupted: by what, if it was.
    """

    def __init__(self, path: Path, process: subprocess.Popen[bytes] | Fork) -> None:
        self.path, self.process = path, process
        self.interrupted: str | None = None

    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    @property
    def in_order(self) -> bool:
        """Whether the notebook ended by itself: then no rank is left that works for it."""
        return self.process.poll() in (0, CELL_FAILED)

    def interrupt(self, cause: str = "interrupted by the user") -> None:
        """Let the cell that runs clean up, and then end; the second time, end at once."""
        if self.interrupted:
            self.kill(self.interrupted)
        else:
            self.interrupted = cause
            assert self.process.stdin is not None  # for the type checker: a pipe was asked for
            with suppress(BrokenPipeError):  # it has just ended
                os.write(self.process.stdin.fileno(), cause.encode())
            self._close()

    def kill(self, cause: str) -> None:
        """End it at once; its kernel notices."""
        self.interrupted = cause
        self.process.kill()

    def result(self) -> JobResult:
        """Wait for its end; read the record that it left.

        Where it could not write one, what is known is written.
        """
        code = self.process.wait()
        self._close()
        # Read as it is written: `read_status` would call a dead process interrupted, whatever ended
        # it.
        status = store.read_json(self.path / "status.json")
        left = status["state"] in ("queued", "running")
        if left and not store.kept_elsewhere(self.path, status):
            if self.interrupted:
                store.interrupt(self.path, self.interrupted)
            else:
                store.fail(self.path, described("the process of the notebook", code).message)
        if code < 0:  # then nobody else says how its runs ended
            store.end_orphans(self.path, store.read_status(self.path)["cause"])
        _clean(self.path / LOG)
        status = store.read_status(self.path)
        return JobResult(self.path, status["state"], status["cause"], status["rank"])

    def _close(self) -> None:
        assert self.process.stdin is not None  # for the type checker: a pipe was asked for
        self.process.stdin.close()


def start(
    notebook: Path,
    values: parameters.Values,
    root: Path | str,
    shown: bool = True,
    resume: bool = False,
) -> Job:
    """Execute a notebook in a fresh process, in a new folder of the folder of all runs.

    Args:
        notebook: path of an .ipynb file.
        values: parameters, checked.
        root: folder of all runs.
        shown: whether its output shows where that of this process does.
        resume: see `execute`.
    """
    again = store.unfinished_job(root, notebook, values) if resume else None
    path = again or store.new_job_directory(root, notebook, values)
    # Not a pipe: nobody would empty it, and a full one stops the notebook.
    output = None if shown else subprocess.DEVNULL
    own = {"LABKIT_JOB": str(path.resolve()), imports.VARIABLE: imports.of_notebook(notebook)}
    # -P: no file beside the caller may stand in for a module. A session of its own: Ctrl-C in
    # the terminal reaches this process alone, which passes it on by closing the pipe; the pipe
    # also closes when this process is killed, so that no job is left behind.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.jobs.job", str(notebook), str(path)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=os.environ | own | ({RESUMES: "1"} if again else {}),
        start_new_session=True,
    )
    return Job(path, process)


def _clean(log: Path) -> None:
    """Keep what a process said beside its notebook's outputs, if anything, without paths."""
    try:
        text = read_file(log, root=log.parents[1]).decode(errors="replace")
    except FileNotFoundError:
        return
    if text.strip():
        store.write_atomically(log, scrub(text))
    else:
        log.unlink()
