"""The process of one notebook: it imports, forks the kernel, executes and records.

`labkit run` starts it as `python -m labkit.jobs.job NOTEBOOK JOB`; a sweep, which has imported
already what it needs, forks it. All else is the same.
"""

from __future__ import annotations

import ast
import ctypes
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from labkit.common.privacy import scrub
from labkit.common.safe_files import make_folder, open_file, read_file
from labkit.jobs.fork import BROKEN, Fork
from labkit.records import registry, store
from labkit.records.endings import ASKS, End, described

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager

    from labkit.jobs.kernel import ForkedKernel

GRACE = 40.0  # seconds that an interrupted cell has to clean up before its kernel is killed
# Seconds in which the rest of a cell's output must arrive once the cell has ended: papermill's 4
# kill a notebook whose outputs are still on their way. Past ours it goes on with a warning.
OUTPUT_LIMIT = 120
# Exit codes. Of a job that did not run to its end in order, ranks may be left that still compute.
CELL_FAILED, KERNEL_ENDED, INTERRUPTED = 1, 3, 130
LOG = Path("logs/process.log")  # what a forked process says beside its notebook's outputs
_SCRIPT = re.compile(r"(?is)(<script\b.*?</script\s*>)")


class Kernel:
    """The kernel of this job: this very Python, whatever kernels are installed."""

    def __init__(self, job: Path) -> None:
        self.job = job
        self.manager: AsyncKernelManager | None = None
        self.rank: int | None = None
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
        """How it has ended, if it has by a signal."""
        code = self._process.poll() if self._process else None
        return described("the kernel", code) if code is not None and code < 0 else None

    @property
    def _pid(self) -> int | None:
        provisioner = self.manager.provisioner if self.manager else None
        return provisioner.pid if provisioner and provisioner.has_process else None

    async def ask_for_rank(self, **_: object) -> None:
        """Remember `rank` and `signal` of the exception that has just ended a cell."""
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


class Record:
    """Where papermill writes the executed notebook: whole or not at all, naming no machine."""

    def write(self, text: str, path: str) -> None:
        """Write one state of the notebook."""
        notebook = json.loads(text)
        papermills = notebook["metadata"].get("papermill", {})
        for key in {"input_path", "output_path"} & papermills.keys():
            papermills[key] = Path(papermills[key]).name
        for cell in notebook["cells"]:
            for output in cell.get("outputs", []):
                # Streams and errors hold their text themselves, results and displays below "data".
                for words in (output, output.get("data", {})):
                    for key in {"text", "traceback", "evalue", "text/plain"} & words.keys():
                        words[key] = _scrubbed(words[key])
                    if "text/html" in words:
                        words["text/html"] = _scrubbed_html(words["text/html"])
        store.write_atomically(
            Path(path), json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        )

    def pretty_path(self, path: str) -> str:
        """What papermill's log calls the file."""
        return path


class Tee:
    """A stream that writes to several: what shows text in the terminal, what keeps it in a file."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = list(streams)

    def write(self, text: str) -> None:
        """Write to what can still be written to: a terminal may close while the job goes on."""
        for stream in list(self._streams):
            try:
                stream.write(text)
                stream.flush()
            except OSError:
                self._streams.remove(stream)

    def flush(self) -> None:
        """Nothing waits: each write is flushed."""


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
        _run(notebook, job, kernel, [sys.stdout, sys.stderr] if shown else [])
        # Before the record says "completed": what the kernel does at its end belongs to the job.
        kernel.close()
        # A kernel that does not end when asked is ended: what its cells have logged is whole.
        store.end_orphans(job, "", seconds=0.0, record=_complete_logged)
        _keep_glued(job)
    except BaseException as error:
        interrupted = kernel.interrupted or isinstance(error, KeyboardInterrupt)
        if interrupted or getattr(error, "ename", "") == "KeyboardInterrupt":
            store.interrupt(job, kernel.interrupted or "interrupted by the user")
            return INTERRUPTED
        if getattr(error, "ename", "") == "Pruned":
            why = str(getattr(error, "evalue", ""))
            kernel.close()  # whose runs say by themselves that they were pruned, if they can
            store.end_orphans(job, why, record=store.prune)
            store.prune(job, why)
            return CELL_FAILED
        from labkit.jobs.log import keep_failed

        if how := kernel.end():
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
    message = str(getattr(error, "evalue", error)).strip().split("\n")[0]
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


def _run(notebook: Path, job: Path, kernel: Kernel, terminal: Sequence[TextIO]) -> None:
    """Execute the notebook by papermill; what its cells print goes to the terminal and a log."""
    import papermill
    from papermill.iorw import papermill_io

    from labkit.records.safe_yaml import read_plain_file

    output = str(job / "output.ipynb")
    # By the file's own name: all else that papermill reads or writes goes its usual way.
    papermill_io.register(output, Record())
    make_folder(job / "logs", job)
    logging.getLogger("papermill").addFilter(_matters)
    values = read_plain_file(job / "params.yaml")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(open_file(job / "logs" / "notebook.log", flags, job), "w") as log:
        papermill.execute_notebook(
            _literal(str(_readable(notebook, job))),
            _literal(output),
            values,
            kernel_name="python3",
            language="python",
            # Its bar would write over what the notebook's cells print.
            progress_bar=False,
            stdout_file=Tee(*terminal[:1], log),
            stderr_file=Tee(*terminal[1:], log),
            # The form, and who looks at a job that runs, read the notebook while it is executed.
            autosave_cell_every=5,
            # What follows reaches nbclient.
            km=kernel.manager,
            iopub_timeout=OUTPUT_LIMIT,
            raise_on_iopub_timeout=False,
            on_cell_error=kernel.ask_for_rank,
        )


def _matters(record: logging.LogRecord) -> bool:
    """Leave out papermill's word on parameters (it cannot read `str | None`) and on saving."""
    return not record.getMessage().startswith(("Passed unknown parameter", "Autosave too slow"))


def _readable(notebook: Path, job: Path) -> Path:
    """A notebook as papermill reads it: of a script, the notebook in it, kept with the job."""
    if notebook.suffix != ".py":
        return notebook
    from labkit.jobs import cells

    return store.write_atomically(job / "notebook.ipynb", cells.text(notebook))


def _literal(path: str) -> str:
    """papermill fills {names} into paths."""
    return path.replace("{", "{{").replace("}", "}}")


def _scrubbed(text: str | list[str]) -> str | list[str]:
    return scrub(text) if isinstance(text, str) else [scrub(line) for line in text]


def _scrubbed_html(text: str | list[str]) -> str:
    """Scripts stay as they are: much of their code looks like a path."""
    parts = _SCRIPT.split("".join(text))
    return "".join(part if _SCRIPT.match(part) else scrub(part) for part in parts)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
