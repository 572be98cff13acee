"""Handles of running experiments: history rows, result, messages, and the last experiment.

The module also answers messages of the Jupyter front end while a cell blocks the kernel.

A Jupyter kernel handles one message at a time. A browser page that is reloaded asks for the
kernel's info and for the state of its widgets. Without this module, a reloaded page would get no
reply before the cell ends. ipykernel 7 receives messages on a separate thread. The receiving thread
can reply while a cell waits for ranks.

The module also lets other cells and processes access the last run submitted to a cluster.

A notebook or process can watch and stop a run that another process has submitted. Only the
submitting process writes the run's record. If the submitting process ends early, the ranks end,
too. A run without its submitting process counts as interrupted.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast
from weakref import WeakValueDictionary

from labkit.cluster.calls import RankError
from labkit.cluster.run_progress import Display, Outline, Row, RunProgress, in_notebook, line
from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.experiment import Experiment
from labkit.records import store
from labkit.records.run import Run
from labkit.records.stream import FOLDER, Message, StreamReader

if TYPE_CHECKING:
    import zmq
    from ipykernel.ipkernel import IPythonKernel
    from ipywidgets import Widget

    from labkit.cluster.panel import LivePanel


Receive: TypeAlias = "Callable[[list[zmq.Frame]], Awaitable[None]]"

ANSWERED = {"kernel_info_request", "comm_info_request", "comm_open", "comm_msg", "comm_close"}


@contextmanager
def answering() -> Iterator[None]:
    """Reply to messages of the Jupyter front end inside the context; requires ipykernel 7."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = cast("IPythonKernel", getattr(shell, "kernel", None))
    if shell is None or getattr(kernel, "shell_channel_thread", None) is None:
        yield
        return

    usual: Receive = kernel.shell_channel_thread_main

    async def handle(message: list[zmq.Frame]) -> None:
        if not await _reply(kernel, message, shell.parent_header):
            await usual(message)

    # A ZMQ stream belongs to one thread. Only the event loop of the receiving thread may call
    # `on_recv`.
    receive = partial(kernel.shell_channel_thread.io_loop.add_callback, kernel.shell_stream.on_recv)
    receive(handle, copy=False)
    try:
        yield
    finally:
        receive(usual, copy=False)


async def _reply(kernel: IPythonKernel, message: list[zmq.Frame], cell: JSON) -> bool:
    """Reply to a message and return True, or return False if the message must wait for the cell."""
    identities, parts = kernel.session.feed_identities(message, copy=False)
    header = kernel.session.deserialize(parts, content=False, copy=False)["header"]
    if header["msg_type"] not in ANSWERED:
        return False
    request = kernel.session.deserialize(parts, copy=False)
    publish = partial(kernel.session.send, kernel.iopub_socket, "status", ident=b"status")
    publish({"execution_state": "busy"}, parent=request)
    answer = kernel.shell_handlers[header["msg_type"]](kernel.shell_stream, identities, request)
    if isinstance(answer, Awaitable):
        await answer
    # A notebook page waits for the kernel status "idle" after each of its messages. After each
    # reply, the kernel sends the page the status "idle". The kernel then sends "busy", because the
    # cell is still running.
    publish({"execution_state": "idle"}, parent=request)
    publish({"execution_state": "busy"}, parent=cell)
    return True


# labkit reads the ranks' messages every 0.25 s (READ_EVERY), the interval at which ranks write
# messages.
READ_EVERY = 0.25
# The display is updated only every 0.5 s (DRAW_EVERY), because more updates would delay clicks in
# the browser.
DRAW_EVERY = 0.5


class RunHandle:
    """A running experiment, returned by `Cluster.submit` and `Cluster.last_submitted`.

    A thread reads the messages of the ranks, updates the displays, and completes the run's record.
    Because a thread follows the run, no notebook cell has to wait for the run. An interrupt of a
    cell does not stop the run.

    Attributes:
        experiment: The experiment, or only its `Outline` if another process has submitted it.
        outline: Label, workers, epochs and clock of the experiment.
        directory: Run directory.
        rows: History rows so far; each row describes one step of one rank.
        epochs: Metrics after each epoch that has ended so far.
        progress: Steps, speed and remaining time, computed from the ranks' messages.
    """

    def __init__(self, experiment: Experiment | Outline, directory: Path) -> None:
        self.experiment, self.directory = experiment, directory
        self.outline = Outline(
            experiment.label, experiment.workers, experiment.epochs, experiment.clock
        )
        self.rows: list[Row] = []
        self.epochs: list[Row] = []
        self.progress = RunProgress(experiment.epochs)
        self._stream = StreamReader(directory / FOLDER)
        # `_newest` maps each rank to the number of its last step. The dict `_newest` also stores
        # the number of the last epoch.
        self._newest: dict[float, float] = {}
        self._panel: LivePanel | None = None
        self._displays: list[Display] = []
        self._drawing = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._run: Run | None = None

    def stop(self) -> None:
        """Ask all ranks to stop training after the same step; the run counts as interrupted."""
        self._stream.stop()

    def done(self) -> bool:
        """Return whether the ranks have ended and the run's record is complete."""
        return self._ended.is_set()

    @property
    def run(self) -> Run | None:
        """The record of the run after the run has ended; None while the run is active."""
        return Run(self.directory) if self._error is not None else self._run

    def result(self) -> Run:
        """Wait for the end of the run and return its record.

        Raises:
            RankError: A rank failed; the record contains the cause and the output.
        """
        with answering():
            self._ended.wait()
        if self._error is not None:
            raise self._error
        # The assert tells the type checker that `_run` is set if no error occurred.
        assert self._run is not None
        return self._run

    def panel(self) -> Widget:
        """Return the progress panel as a widget, which is also shown below a cell's RunHandle."""
        from labkit.cluster.panel import LivePanel

        with self._drawing:
            if self._panel is None:
                self._panel = LivePanel(self)
                self._displays.append(self._panel)
            self._panel.draw(self)
        return self._panel.widget

    def show(self) -> None:
        """Show progress until the run ends, as a panel in JupyterLab or as a line in a terminal."""
        if in_notebook():
            from IPython.display import display

            display(self.panel())
        else:
            with self._drawing:
                self._displays.append(line())
        # The thread that follows the run may have drawn the last state before `show` added the
        # display.
        if self.done():
            self._draw(last=True)

    def __repr__(self) -> str:
        state = self.progress.doing if self.run is None else self.run.status["state"]
        return f"<Live {self.outline.label}: {state}, step {self.progress.steps}>"

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, JSON]:
        bundle = (self.panel()._repr_mimebundle_() or {}) if in_notebook() else {}
        return bundle | {"text/plain": repr(self)}

    # --- the thread --------------------------------------------------------------------------

    def begin(self, show: bool = False) -> None:
        """Start a thread that reads the run's messages, and displays progress if `show` is True."""
        # The thread is a daemon, so that the interpreter can exit before the ranks have ended.
        threading.Thread(target=self._follow, name="labkit-live", daemon=True).start()
        if show:
            try:
                self.show()
            except Exception as error:
                warnings.warn(f"{self!r} cannot be shown: {error!r}", stacklevel=2)

    def _follow(self) -> None:
        try:
            for _ in self._watch():
                self._read()
            self._read(last=True)
            self._run = self._finish()
        except BaseException as error:
            try:
                self._record_failure(error)
            finally:
                # The error is set even if recording the failure fails, because `result` must raise
                # the error.
                self._error = error
        finally:
            try:
                self._release()
                self._draw(last=True)
            finally:
                # The event `_ended` is set last, because `result` returns as soon as the event is
                # set.
                self._ended.set()

    def _watch(self) -> Iterator[None]:
        """Yield repeatedly until the ranks have ended."""
        raise NotImplementedError

    def _finish(self) -> Run:
        """Complete and return the run's record; if this method fails, the run counts as failed."""
        raise NotImplementedError

    def _record_failure(self, error: BaseException) -> None:
        """Write a failure to the run's record if this process is the writer of the record."""

    def _release(self) -> None:
        """Release the ranks, so that other calls can use them."""

    _read_at = _drawn_at = 0.0

    def _read(self, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._read_at > READ_EVERY:
            self._read_at = now
            # `_read` reads files before it acquires the lock, because reading may be slow. A user's
            # click also needs the lock of the display.
            messages = self._stream.read()
            with self._drawing:
                self._add(messages)
        if not last and now - self._drawn_at > DRAW_EVERY:
            self._drawn_at = now
            self._draw()

    def _add(self, messages: list[Message]) -> None:
        messages = [message for message in messages if self._is_new(*message)]
        self.progress.add(messages)
        self.rows += [record for kind, record in messages if kind == "step"]
        self.epochs += [record for kind, record in messages if kind == "epoch"]

    def _is_new(self, kind: str, record: Row) -> bool:
        """Return whether a record is new; ranks that resume training send earlier records again."""
        if kind not in ("step", "epoch"):
            return True
        rank = -1 if kind == "epoch" else record["rank"]
        number = record[kind]
        is_new = number > self._newest.get(rank, -1)
        if is_new:
            self._newest[rank] = number
        return is_new

    def _draw(self, last: bool = False) -> None:
        with self._drawing:
            for display in list(self._displays):
                try:
                    display.close(self) if last else display.draw(self)
                except Exception as error:  # an error in a display must not end the run
                    self._displays.remove(display)
                    warnings.warn(
                        f"{self!r} is no longer displayed, because its display failed: {error!r}",
                        stacklevel=2,
                    )


# The file `last-run` in a cluster's folder contains the directory of the run that was submitted
# last.
LAST = "last-run"
# `_handles` maps the directory of each run that this process follows to the handle of the run.
_handles: WeakValueDictionary[Path, RunHandle] = WeakValueDictionary()


class AttachedRun(RunHandle):
    """A RunHandle of a run that has ended or that another process has submitted."""

    def __init__(self, directory: Path, show: bool = False) -> None:
        record = store.read_json(directory / "experiment.json")
        # `AttachedRun` reads only the run's record, because the experiment may contain functions
        # that another process has defined.
        clock = record.get("clock", "wall")
        outline = Outline(directory.name, record["workers"], record["epochs"], clock)
        super().__init__(outline, directory)
        _handles[directory] = self
        self.begin(show)

    def _watch(self) -> Iterator[None]:
        while store.read_status(self.directory)["state"] == "running":
            yield
            # `AttachedRun` polls the record, because the process that submitted the run cannot
            # notify other processes.
            time.sleep(READ_EVERY)

    def _finish(self) -> Run:
        run = Run(self.directory)
        # The run's record contains all history rows. `AttachedRun` may miss the last rows in the
        # message stream.
        counts = {rank: state.steps for rank, state in self.progress.ranks.items()}
        history = run.history.to_dict("records")
        rows = [row for row in history if row["step"] >= counts.get(int(row["rank"]), 0)]
        epochs = run.metrics.get("epochs", [])[len(self.epochs) :]
        with self._drawing:
            self._add([("step", row) for row in rows] + [("epoch", epoch) for epoch in epochs])
        status = run.status
        if status["state"] == "failed":
            raise RankError(str(status.get("cause")), status.get("rank"))
        return run

    def _release(self) -> None:
        # The message stream still exists if the process that submitted the run has died.
        shutil.rmtree(self.directory / FOLDER, ignore_errors=True)


def remember(folder: Path, live: RunHandle) -> None:
    """Record the run as the last run that was submitted to the cluster in `folder`."""
    _handles[live.directory] = live
    store.write_atomically(folder / LAST, str(live.directory))


def last_submitted(folder: Path, show: bool = False) -> RunHandle:
    """Return the handle of the run that was last submitted to the cluster in `folder`.

    Raises:
        LabkitError: No run was submitted, or its directory is missing.
    """
    try:
        directory = Path((folder / LAST).read_text())
    except FileNotFoundError:
        raise LabkitError(
            f"no experiment was submitted to cluster {folder.name!r} yet: use submit(experiment)"
        ) from None
    # A run has only one handle per process, so that `stop` and `result` act on the same object.
    live = _handles.get(directory)
    if live is None:
        return AttachedRun(directory, show)
    if show:
        live.show()
    return live
