"""The process that runs a notebook: it forks the kernel, executes cells and records the result.

`labkit run` starts this module as `python -m labkit.jobs.job NOTEBOOK JOB`. A sweep has already
imported the libraries, so it forks the process of each notebook.
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
from labkit.common.files import make_folder, open_file, read_file
from labkit.jobs import execution
from labkit.jobs.fork import BROKEN, Fork
from labkit.records import folders, store
from labkit.records.endings import STOP_SIGNALS, End, describe_exit

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from nbformat import NotebookNode

    from labkit.jobs.kernel import ForkedKernel


# After an interruption, a cell has `GRACE` seconds to clean up before its kernel is killed.
GRACE = 40.0

# `CELL_FAILED`, `KERNEL_ENDED` and `INTERRUPTED` are exit codes of jobs that have not completed.
# After an exit code other than 0 and `CELL_FAILED`, ranks of the notebook's cluster may still run.
CELL_FAILED, KERNEL_ENDED, INTERRUPTED = 1, 3, 130
# The file logs/process.log contains the text that a forked job prints outside of its notebook's
# outputs.
LOG = Path("logs/process.log")


class Kernel:
    """The IPython kernel of a job; it always uses the Python interpreter of this process."""

    def __init__(self, job: Path) -> None:
        self.job = job
        self.manager: AsyncKernelManager | None = None
        self.rank: int | None = None
        # The mapping `error` contains `ename` and `evalue`, the class name and the message of the
        # last cell error.
        self.error: dict[str, str] = {}
        # The attribute `signal` names the signal that ended a process of the notebook's cluster;
        # otherwise, it is empty.
        self.signal = ""
        # The attribute `interrupted` is the cause of an interruption, or None.
        self.interrupted: str | None = None
        self._process: ForkedKernel | None = None

    def fork(self) -> None:
        """Fork the kernel's process before this process opens sockets or starts threads."""
        from labkit.jobs.kernel import Client, ForkedKernel, Provisioner

        self._process = embryo = ForkedKernel()
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import AsyncKernelManager

        # If jupyter_client has no folders of kernel specifications, the kernel "python3" is the
        # Python interpreter of this process.
        self.manager = manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            client_factory=Client,
            # Without transport encryption, every user of the machine could read the output of
            # cells.
            transport_encryption="required",
            # jupyter_client kills the kernel after half of the `shutdown_wait_time`. The atexit
            # functions of the kernel save records. On a busy machine, the kernel's atexit functions
            # take longer than the default timeout of 2.5 s.
            shutdown_wait_time=GRACE,
        )
        manager.provisioner = Provisioner(
            kernel_id=str(uuid.uuid4()), kernel_spec=manager.kernel_spec, parent=manager
        )
        manager.provisioner.embryo = embryo

    def interrupt(self, cause: str) -> None:
        """Interrupt the cell, or the process if no kernel runs; kill the kernel after `GRACE` s."""
        self.interrupted = self.interrupted or cause
        store.write_reason(self.job, self.interrupted)
        # A kernel may start or end between the signals SIGINT and SIGKILL. The code therefore reads
        # `_pid` again before the second signal.
        _interrupt(self._pid or os.getpid())
        time.sleep(GRACE)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def end(self) -> End | None:
        """Return how the kernel ended (exit code or signal); None while the kernel runs."""
        code = self._process.poll() if self._process else None
        return None if code is None else describe_exit("the kernel", code)

    @property
    def _pid(self) -> int | None:
        provisioner = self.manager.provisioner if self.manager else None
        return provisioner.pid if provisioner and provisioner.has_process else None

    async def on_cell_error(
        self, cell: NotebookNode, execute_reply: Mapping[str, Any], **_: object
    ) -> None:
        """Store the attributes `rank` and `signal` of the exception that ended a cell.

        Raises:
            KeyboardInterrupt: The job was interrupted in a cell with the tag raises-exception,
                which tolerates other exceptions.
        """
        if self.interrupted and execution.MAY_RAISE in cell.metadata.tags:
            raise KeyboardInterrupt
        content = execute_reply["content"]
        self.error = {name: content[name] for name in ("ename", "evalue") if content.get(name)}
        # An earlier cell may have failed, and its tag raises-exception may have allowed the error.
        # The attributes `rank` and `signal` would still describe the earlier error.
        self.rank, self.signal = None, ""
        from jupyter_client.asynchronous import AsyncKernelClient

        # The client from `manager.client()` would have the identity of papermill's client. The
        # client would then receive the replies to papermill. The code therefore creates a new
        # client. The assertion tells the type checker that a kernel manager exists when a cell
        # runs.
        assert self.manager is not None
        client = AsyncKernelClient()
        client.load_connection_info(self.manager.get_connection_info())
        client.start_channels(iopub=False, stdin=False, hb=False)
        try:
            # IPython stores an uncaught exception in `sys.last_value`.
            error = "__import__('sys').last_value"
            wanted = {"rank": f"int({error}.rank)", "signal": f"str({error}.signal)"}
            reply = await client.execute(
                "", silent=True, user_expressions=wanted, reply=True, timeout=30
            )
            for name, answer in reply["content"].get("user_expressions", {}).items():
                if answer.get("status") == "ok":
                    setattr(self, name, ast.literal_eval(answer["data"]["text/plain"]))
        except TimeoutError:  # the kernel is ending, so only the error itself is recorded
            return
        finally:
            client.stop_channels()

    def close(self) -> None:
        """Shut down the kernel without killing it, so that its atexit functions run."""
        from jupyter_core.utils import run_sync

        if self.manager is not None and self.manager.has_kernel:
            run_sync(self.manager.shutdown_kernel)()


def main(notebook: Path, job: Path, limit: float | None = None, show: bool = True) -> int:
    """Execute a notebook with the parameters in its job folder; return the job's exit code.

    Args:
        notebook: Notebook file (.ipynb).
        job: Folder of the job.
        limit: Time limit in seconds, after which the notebook is interrupted; None for no limit.
        show: Whether the terminal also shows the notebook's output.
    """
    kernel = Kernel(job)
    # The method `interrupt` runs in a thread, because it waits before it kills a kernel that
    # ignores SIGINT.
    stop = partial(kernel.interrupt, "ended by SIGTERM (labkit stop sends it)")
    signal.signal(signal.SIGTERM, lambda *_: _start(stop))
    with folders.registration(job):
        return _record(notebook, job, kernel, limit, show)


def _record(notebook: Path, job: Path, kernel: Kernel, limit: float | None, shown: bool) -> int:
    """Execute the notebook, and record how its job ended; the arguments are those of `main`."""
    try:
        store.mark_running(job)
        prepare()
        kernel.fork()
        _watch(kernel, limit)
        terminal = [sys.stdout, sys.stderr] if shown else []
        execution.execute_cells(notebook, job, kernel.manager, kernel.on_cell_error, terminal)
        # The kernel is closed before the state becomes "completed", because the job includes the
        # kernel's atexit functions.
        kernel.close()
        # If a kernel ignores the shutdown request, it is killed, but the runs that it logged are
        # complete.
        store.end_orphans(job, "", seconds=0.0, record=_complete_logged)
        _record_glued(job)
    except BaseException as error:
        interrupted = kernel.interrupted or isinstance(error, KeyboardInterrupt)
        if interrupted or getattr(error, "ename", "") == "KeyboardInterrupt":
            # If the job's process received no signal, the cell itself raised KeyboardInterrupt.
            by = "interrupted by the user" if isinstance(error, KeyboardInterrupt) else cause(error)
            store.interrupt(job, kernel.interrupted or by)
            return INTERRUPTED
        if getattr(error, "ename", "") == "Pruned":
            why = str(getattr(error, "evalue", ""))
            # If the kernel's atexit functions still run, they record that a hyperparameter search
            # pruned (ended early) the runs.
            kernel.close()
            store.end_orphans(job, why, record=store.prune)
            store.prune(job, why)
            return CELL_FAILED
        from labkit.jobs.log import keep_failed

        # IPython prints some errors without a report to papermill. For example, IPython only prints
        # the error of an unknown magic command.
        if getattr(error, "ename", "") == "CellExecutionError":
            vars(error).update(kernel.error)
        # A kernel may also end after a shutdown request. Only a signal or a DeadKernelError proves
        # that the kernel died.
        if (how := kernel.end()) and (how.signal or type(error).__name__ == "DeadKernelError"):
            keep_failed(job, how.message)
            store.fail(job, how.message)
            store.end_orphans(job, how.message)
            return KERNEL_ENDED
        if kernel.signal in STOP_SIGNALS:
            store.interrupt(job, cause(error), kernel.rank)
        else:
            keep_failed(job, cause(error), kernel.rank)
            store.fail(job, cause(error), kernel.rank)
        # Only papermill's error of a cell has an `ename`; any other error is a bug in labkit.
        return CELL_FAILED if hasattr(error, "ename") else BROKEN
    finally:
        kernel.close()
        store.clear_reason(job)
    store.complete(job)
    return 0


def _complete_logged(run: Path, _: str) -> None:
    metrics = run / "metrics.json"
    if metrics.exists() and "logged" in store.read_json(metrics):
        store.complete(run)


def forked(notebook: Path, job: Path, environment: Mapping[str, str], limit: float | None) -> Fork:
    """Fork the process of a job from this process, which must have called `prepare`.

    Args:
        notebook: Notebook to execute.
        job: Folder of the job.
        environment: Environment variables of the job that are added to those of this process.
        limit: Time limit in seconds, after which the notebook is interrupted; None for no limit.
    """

    def act(control: int) -> int:
        log = open_file(job / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, job, 0o644)
        for source, target in ((control, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        # Python's old stream objects still refer to the streams of the parent. The forked process
        # therefore creates new stream objects.
        sys.stdin = os.fdopen(0)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        os.environ.update({**environment, "LABKIT_JOB": str(job.resolve())})
        return main(notebook, job, limit, show=False)

    make_folder(job / "logs", job)
    return Fork(act)


def cause(error: BaseException) -> str:
    """Return a line with the number of the failed cell, the exception's type and its message.

    >>> cause(ValueError("no rows"))
    'ValueError: no rows'
    """
    name = getattr(error, "ename", type(error).__name__)
    message = gist(str(getattr(error, "evalue", error)))
    number = getattr(error, "exec_count", None)
    place = f"cell In [{number}]: " if number else ""
    return f"{place}{name}: {message}" if message else f"{place}{name}"


def prepare() -> None:
    """Import the libraries that execute notebooks and kernels, so that forks inherit them."""
    # At import, jsonschema compiles a grammar of web addresses, which takes one second per
    # notebook. Notebooks do not need the check of web addresses. jsonschema omits the check of
    # addresses if the module `rfc3987_syntax` is missing.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import ipyparallel  # noqa: F401
    import nbformat
    import papermill  # noqa: F401

    import labkit.jobs.kernel  # noqa: F401

    # The call compiles nbformat's JSON schema once, so that forked processes inherit it.
    nbformat.validate(nbformat.v4.new_notebook())


def _interrupt(pid: int) -> None:
    """Send SIGINT to the main thread of a process, where Python raises KeyboardInterrupt.

    Linux may deliver a signal for the process to any of its threads. The function therefore sends
    SIGINT to the main thread, not to the process. Another thread may receive SIGINT if the main
    thread has a pending signal. For example, a SIGTERM is pending after Slurm has sent SIGTERM to
    all processes of a job. If another thread received SIGINT, the signal would not interrupt a
    `time.sleep` in the cell.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).tgkill(pid, pid, signal.SIGINT)
    else:
        os.kill(pid, signal.SIGINT)


def _watch(kernel: Kernel, limit: float | None) -> None:
    """Interrupt the notebook at its time limit, or when the job's parent process closes the pipe.

    The parent process writes a cause into the pipe, then closes the pipe. The pipe also closes if
    the parent process dies. The command `labkit stop` sends SIGTERM instead of closing the pipe.
    """

    def wait_for_the_end_of_input() -> None:
        # `sys.stdin.read` returns when all writers have closed the pipe.
        kernel.interrupt(
            sys.stdin.read() or "interrupted: the command that started the notebook has ended"
        )

    def wait_for_the_limit(seconds: float) -> None:
        time.sleep(seconds)
        kernel.interrupt(f"stopped at the time limit of {seconds:g} s")

    _start(wait_for_the_end_of_input)
    if limit is not None:
        _start(partial(wait_for_the_limit, limit))


def _record_glued(job: Path) -> None:
    """Write a run with all values that scrapbook or papermill stored in output.ipynb, if any."""
    if "application/scrapbook.scrap" in (text := read_file(job / "output.ipynb").decode()) or (
        "application/papermill.record" in text
    ):
        # The module `labkit.jobs.log` registers a function for the end of a kernel. A kernel that
        # is forked from this process must not inherit the function.
        from labkit.jobs.glue import write_glued_run

        write_glued_run(job)


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
