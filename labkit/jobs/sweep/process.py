"""The process of one member: forked from the sweep, which has imported what jobs import."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

from labkit.common.privacy import scrub
from labkit.jobs import job as jobs
from labkit.jobs.sweep import kernel as kernels
from labkit.records.store import write_atomically

LOG = Path("logs/process.log")


def prepare() -> None:
    """Import once what every member would import."""
    jobs.prepare()
    kernels.prepare()


class Process:
    """A running member.

    It ends with the sweep, in whatever way that ends: it holds the reading end of a pipe of which
    the sweep alone has the other.

    Args:
        notebook: what it executes.
        job: its job's folder.
        environment: variables that it gets beside the sweep's.
        limit: seconds after which it is interrupted.
        others: members that run.
    """

    def __init__(
        self,
        notebook: Path,
        job: Path,
        environment: dict[str, str],
        limit: float | None,
        others: Iterable[Process],
    ) -> None:
        (job / "logs").mkdir(exist_ok=True)
        self._job = job
        self.code: int | None = None
        self.interrupted: str | None = None  # by what
        self._pipe: int | None
        control, self._pipe = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for each in (self, *others):
                each._close()
            _execute(notebook, job, environment, limit, control)
        os.close(control)

    def ended(self) -> bool:
        """Whether it has ended; then `code` says how."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self._close()
                _clean(self._job / LOG)
        return self.code is not None

    @property
    def in_order(self) -> bool:
        """Whether the notebook ended by itself: then no rank is left that works for it."""
        return self.code in (0, jobs.CELL_FAILED)

    def interrupt(self) -> None:
        """Let the cell that runs clean up, and then end."""
        self.interrupted = "interrupted by the user"
        self._close()

    def kill(self, cause: str) -> None:
        """End it at once; its kernel notices."""
        self.interrupted = cause
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)

    def _close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def _execute(
    notebook: Path,
    job: Path,
    environment: dict[str, str],
    limit: float | None,
    control: int,
) -> NoReturn:
    """Be the process `python -m labkit.jobs.job`; never come back to the sweep's own code."""
    code = jobs.BROKEN
    try:
        os.setsid()  # Ctrl-C in the terminal is for the sweep
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(job / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((control, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        sys.stdin = os.fdopen(0)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.environ.update(environment | {"LABKIT_JOB": str(job.resolve())})
        embryo = kernels.Embryo()  # while there is neither thread nor socket
        kernel = jobs.Kernel(partial(kernels.provisioner, embryo))
        code = jobs.main(str(notebook), str(job), kernel, limit, shown=False)
    except BaseException:
        traceback.print_exc()
    finally:
        kernels.leave(code)


def _clean(log: Path) -> None:
    """Keep what a process said beside its notebook's outputs, if anything, without paths."""
    text = log.read_text(errors="replace") if log.exists() else ""
    if text.strip():
        write_atomically(log, scrub(text))
    else:
        log.unlink(missing_ok=True)
