"""The process of one notebook: it imports, forks the kernel, executes and records.

`labkit run` starts it as `python -m labkit.jobs.job NOTEBOOK JOB`; a sweep, which has imported
already what it needs, forks it. All else is the same.
"""

from __future__ import annotations

import ast
import ctypes
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.common.errors import gist
from labkit.common.safe_files import make_folder, open_file, read_file
from labkit.jobs import execution
from labkit.jobs.fork import BROKEN, Fork
from labkit.records import registry, store
from labkit.records.endings import ASKS, End, described

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from nbformat import NotebookNode

    from labkit.jobs.kernel import ForkedKernel

GRACE = 40.0  # seconds that an interrupted cell has to clean up before its kernel is killed
# Exit codes. Of a job that did not run to its end in order, ranks may be left that still compute.
CELL_FAILED, KERNEL_ENDED, INTERRUPTED = 1, 3, 130
LOG = Path("logs/process.log")  # what a forked process says beside its notebook's outputs


class Kernel:
    """The kernel of this job: this very Python, whatever kernels are installed."""

    def __init__(self, job: Path) -> None:
        self.job = job
        self.manager: AsyncKernelManager | None = None
        self.rank: int | None = None
        self.error: dict[str, str] = {}  # `ename` and `evalue` of the last cell that raised one
        self.signal = ""  # by which a part of its cluster has ended
        self.interrupted: str | None = None  # by what
        self._process: ForkedKernel | None = None

    def fork(self) -> None:
        """Fork what becomes the kernel, while this process has neither thread nor socket."""
        from labkit.jobs.kernel import Client, ForkedKernel, Provisioner

        self._process = embryo = ForkedKernel()
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import AsyncKernelManager

        # Where no folder of kernels is looked into, "python3" is the interpreter that asks.
        self.manager = manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            client_factory=Client,
            # Without it every user of this machine could read what cells print.
            transport_encryption="required",
            # Half of it passes before the kernel is ended: its atexit functions keep records, and
            # on a busy machine they take longer than the 2.5 s that there are by default.
            shutdown_wait_time=GRACE,
        )
        manager.provisioner = Provisioner(
            kernel_id=str(uuid.uuid4()), kernel_spec=manager.kernel_spec, parent=manager
        )
        manager.provisioner.embryo = embryo

    def interrupt(self, cause: str) -> None:
        """Interrupt the running cell, or this process where no kernel is up; insist after GRACE."""
        self.interrupted = self.interrupted or cause
        store.give_reason(self.job, self.interrupted)
        # Asked at each use: between the two signals a kernel may have come up, or ended.
        _interrupt(self._pid or os.getpid())
        time.sleep(GRACE)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def end(self) -> End | None:
        """How it has ended, if it has: by a signal, or a cell by `os._exit`."""
        code = self._process.poll() if self._process else None
        return None if code is None else described("the kernel", code)

    @property
    def _pid(self) -> int | None:
        provisioner = self.manager.provisioner if self.manager else None
        return provisioner.pid if provisioner and provisioner.has_process else None

    async def on_cell_error(
        self, cell: NotebookNode, execute_reply: Mapping[str, Any], **_: object
    ) -> None:
        """Remember `rank` and `signal` of the exception that has just ended a cell.

        Raises:
            KeyboardInterrupt: the job was interrupted in a cell that may raise.
        """
        if self.interrupted and execution.MAY_RAISE in cell.metadata.tags:
            raise KeyboardInterrupt
        content = execute_reply["content"]
        self.error = {name: content[name] for name in ("ename", "evalue") if content.get(name)}
        self.rank, self.signal = None, ""  # not those of an earlier cell, which was allowed to fail
        from jupyter_client.asynchronous import AsyncKernelClient

        # Not manager.client(): it would share the identity of papermill's, and take its replies.
        assert self.manager is not None  # for the type checker: a cell has run
        client = AsyncKernelClient()
        client.load_connection_info(self.manager.get_connection_info())
        client.start_channels(iopub=False, stdin=False, hb=False)
        try:
            # `last_value` is what IPython keeps of an exception that nobody caught.
            error = "__import__('sys').last_value"
            wanted = {"rank": f"int({error}.rank)", "signal": f"str({error}.signal)"}
            reply = await client.execute(
                "", silent=True, user_expressions=wanted, reply=True, timeout=30
            )
            for name, answer in reply["content"].get("user_expressions", {}).items():
                if answer.get("status") == "ok":
                    setattr(self, name, ast.literal_eval(answer["data"]["text/plain"]))
        except TimeoutError:  # the kernel is dying: the record then names the error alone
            return
        finally:
            client.stop_channels()

    def close(self) -> None:
        """Let the kernel end: its atexit functions run."""
        from jupyter_core.utils import run_sync

        if self.manager is not None and self.manager.has_kernel:
            run_sync(self.manager.shutdown_kernel)()


def main(notebook: Path, job: Path, limit: float | None = None, shown: bool = True) -> int:
    """Execute the notebook with the parameters of its job's folder; returns the exit code.

    Args:
        notebook: an .ipynb file.
        job: the folder.
        limit: seconds after which the notebook is interrupted.
        shown: whether its output goes to the terminal, too.
    """
    kernel = Kernel(job)
    # A thread: whoever is interrupted may have to be insisted on.
    stop = partial(kernel.interrupt, "ended by SIGTERM (labkit stop sends it)")
    signal.signal(signal.SIGTERM, lambda *_: _start(stop))
    with registry.registration(job):
        return _record(notebook, job, kernel, limit, shown)


def _record(notebook: Path, job: Path, kernel: Kernel, limit: float | None, shown: bool) -> int:
    """Execute the notebook and record how that ends; arguments as of `main`."""
    try:
        store.mark_running(job)
        prepare()
        kernel.fork()
        _watch(kernel, limit)
        terminal = [sys.stdout, sys.stderr] if shown else []
        execution.execute_cells(notebook, job, kernel.manager, kernel.on_cell_error, terminal)
        # Before the record says "completed": what the kernel does at its end belongs to the job.
        kernel.close()
        # A kernel that does not end when asked is ended: what its cells have logged is whole.
        store.end_orphans(job, "", seconds=0.0, record=_complete_logged)
        _keep_glued(job)
    except BaseException as error:
        interrupted = kernel.interrupted or isinstance(error, KeyboardInterrupt)
        if interrupted or getattr(error, "ename", "") == "KeyboardInterrupt":
            # Without a signal to this process, the cell's own: `raise KeyboardInterrupt`.
            by = "interrupted by the user" if isinstance(error, KeyboardInterrupt) else cause(error)
            store.interrupt(job, kernel.interrupted or by)
            return INTERRUPTED
        if getattr(error, "ename", "") == "Pruned":
            why = str(getattr(error, "evalue", ""))
            kernel.close()  # whose runs say by themselves that they were pruned, if they can
            store.end_orphans(job, why, record=store.prune)
            store.prune(job, why)
            return CELL_FAILED
        from labkit.jobs.log import keep_failed

        if getattr(error, "ename", "") == "CellExecutionError":  # IPython printed it: `%nosuch`
            vars(error).update(kernel.error)
        # A kernel that was asked to end has ended, too, whatever failed then.
        if (how := kernel.end()) and (how.signal or type(error).__name__ == "DeadKernelError"):
            keep_failed(job, how.message)
            store.fail(job, how.message)
            store.end_orphans(job, how.message)
            return KERNEL_ENDED
        if kernel.signal in ASKS:
            store.interrupt(job, cause(error), kernel.rank)
        else:
            keep_failed(job, cause(error), kernel.rank)
            store.fail(job, cause(error), kernel.rank)
        # Only papermill's error of a cell has an `ename`: any other is a fault of ours.
        return CELL_FAILED if hasattr(error, "ename") else BROKEN
    finally:
        kernel.close()
        store.forget_reason(job)
    store.complete(job)
    return 0


def _complete_logged(run: Path, _: str) -> None:
    metrics = run / "metrics.json"
    if metrics.exists() and "logged" in store.read_json(metrics):
        store.complete(run)


def forked(notebook: Path, job: Path, environment: Mapping[str, str], limit: float | None) -> Fork:
    """Fork the process of a job from this one, which has called `prepare`.

    Args:
        notebook: what it executes.
        job: its folder.
        environment: variables that it gets beside this process's.
        limit: seconds after which it is interrupted.
    """

    def act(control: int) -> int:
        log = open_file(job / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, job, 0o644)
        for source, target in ((control, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        # Python's own objects still hold the parent's streams, whatever lies beneath them now.
        sys.stdin = os.fdopen(0)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.environ.update({**environment, "LABKIT_JOB": str(job.resolve())})
        return main(notebook, job, limit, shown=False)

    make_folder(job / "logs", job)
    return Fork(act)


def cause(error: BaseException) -> str:
    """One line: the cell's number in output.ipynb, the exception and its message.

    >>> cause(ValueError("no rows"))
    'ValueError: no rows'
    """
    name = getattr(error, "ename", type(error).__name__)
    message = gist(str(getattr(error, "evalue", error)))
    number = getattr(error, "exec_count", None)
    place = f"cell In [{number}]: " if number else ""
    return f"{place}{name}: {message}" if message else f"{place}{name}"


def prepare() -> None:
    """Import what executes notebooks, and what kernels import: a fork has it already."""
    # jsonschema compiles a grammar of web addresses at import, which costs a second a notebook and
    # checks nothing that a notebook has; without this module it leaves that check out.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import ipyparallel  # noqa: F401
    import nbformat
    import papermill  # noqa: F401

    import labkit.jobs.kernel  # noqa: F401

    nbformat.validate(nbformat.v4.new_notebook())  # compiles the schema


def _interrupt(pid: int) -> None:
    """Send SIGINT to the main thread of a process, where Python raises it.

    Where another signal is on its way to that thread, as Slurm sends SIGTERM to all processes, the
    system would give this one to a thread that only notes it, and the cell would sleep on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).tgkill(pid, pid, signal.SIGINT)
    else:
        os.kill(pid, signal.SIGINT)


def _watch(kernel: Kernel, limit: float | None) -> None:
    """Interrupt the notebook when its time is up, or who started this process wants it to end.

    That one writes why and closes the pipe, or dies; `labkit stop` sends SIGTERM.
    """

    def wait_for_the_end_of_input() -> None:
        # This returns when the last writer has gone.
        kernel.interrupt(sys.stdin.read() or "interrupted: the command that started it is gone")

    def wait_for_the_limit(seconds: float) -> None:
        time.sleep(seconds)
        kernel.interrupt(f"past the limit of {seconds:g} s")

    _start(wait_for_the_end_of_input)
    if limit is not None:
        _start(partial(wait_for_the_limit, limit))


def _keep_glued(job: Path) -> None:
    """Make a run of what the notebook has glued; few notebooks have, so look first."""
    if "application/scrapbook.scrap" in (text := read_file(job / "output.ipynb").decode()) or (
        "application/papermill.record" in text
    ):
        from labkit.jobs import glue

        glue.keep(job)


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
