"""The IPython kernel of jobs: it starts fast, loses no output, and handles interrupts safely.

A new Python interpreter for each notebook would spend two seconds on the same imports. To import
the libraries only once, a process without threads or sockets imports the libraries and then forks.
The forked child waits for the kernel's arguments and then becomes the kernel. The kernel shares
only unmodified memory pages with other processes.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import math
import os
import signal
import sys
import time
import warnings
from asyncio import Future
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import Empty
from types import CodeType, FrameType
from typing import Any

import zmq
import zmq.asyncio
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Integer, Type

from labkit.common import imports
from labkit.jobs.fork import Fork
from labkit.records import provenance
from labkit.records.endings import terminate
from labkit.records.store import ELEMENT

# debugpy is slow to import, and jobs need no debugger. The code hides debugpy during the import of
# `ipykernel.debugger`.
if "debugpy" not in sys.modules:
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    import ipykernel.debugger  # noqa: F401

    del sys.modules["debugpy"]

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell

# A kernel must start within `START_TIMEOUT` seconds; the value is papermill's default.
START_TIMEOUT = 60.0


class Shell(ZMQInteractiveShell):
    """An IPython shell that defers an interrupt between two cells to the start of the next cell.

    ipykernel itself ignores an interrupt between two cells. If an interrupt arrives while ipykernel
    prepares a cell or the reply to a cell, ipykernel never replies.

    Attributes:
        executing: Whether a statement of a cell is being executed.
        interrupt_pending: Whether the next statement will raise KeyboardInterrupt.
    """

    executing = interrupt_pending = False

    @classmethod
    def interrupt(cls, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: raise KeyboardInterrupt in the current statement, or else in the next."""
        if cls.executing:
            raise KeyboardInterrupt
        cls.interrupt_pending = True

    async def run_code(
        self, code_obj: CodeType, result: Any = None, *, async_: bool = False
    ) -> bool:
        """Execute statements of a cell, and return whether one of them failed."""
        # `executing` and `interrupt_pending` are class attributes, because a signal may arrive
        # before a shell object exists.
        outer, Shell.executing = Shell.executing, True
        try:
            if Shell.interrupt_pending:
                Shell.interrupt_pending = False
                raise KeyboardInterrupt
            failed: bool = await super().run_code(code_obj, result, async_=async_)
            return failed
        finally:
            Shell.executing = outer

    def ask_exit(self) -> None:
        """End the notebook, as `sys.exit` does, if a cell calls `quit()` or `exit(3)`.

        By default, IPython would continue the cell and would end the kernel some time later.
        """
        # IPython stores the argument of `exit` in `keepkernel_on_exit`.
        code: Any = self.keepkernel_on_exit
        raise SystemExit(code if type(code) in (int, str) else 0)


class InterruptibleKernel(IPythonKernel):
    """An IPython kernel that leaves all interrupts to its `Shell`."""

    shell_class = Type(Shell)

    def pre_handler_hook(self) -> None:
        """Install the shell's SIGINT handler again, because a cell may have replaced it."""
        signal.signal(signal.SIGINT, Shell.interrupt)

    post_handler_hook = pre_handler_hook

    @contextmanager
    def _cancel_on_sigint(self, future: Future[Any]) -> Iterator[None]:
        """Let SIGINT cancel an async cell; if the cell still succeeds, interrupt the next one."""
        struck = False

        def strike(number: int, frame: FrameType | None) -> None:
            nonlocal struck
            struck = True
            cancel(number, frame)

        with super()._cancel_on_sigint(future):
            # The variable `cancel` keeps the previous SIGINT handler, because `strike` replaces it
            # and calls it.
            cancel: Any = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, strike)
            yield
        if struck and future.result().success:
            Shell.interrupt_pending = True


class LosslessKernel(IPKernelApp):
    """An IPython kernel with an unlimited output queue, so that slow readers lose no output.

    By default, ZeroMQ queues 1,000 messages for a subscriber, and drops all further messages. With
    a limited queue, a slow reader could miss the end of a cell.

    At exit, the control thread ends before the output thread, because the control thread still
    sends outputs. If the output thread ended first, the control thread would wait 10 s.
    """

    kernel_class = Type(InterruptibleKernel)
    report_pipe = Integer(
        help="The writing end of a pipe that reports when the kernel is reachable."
    )

    def start(self) -> None:
        """Report that the kernel is reachable, and serve requests."""
        job = Path(os.environ["LABKIT_JOB"])
        assert self.shell is not None  # `initialize` has created the shell
        provenance.write(job, begin=True)
        # The record is written after each cell, because a kernel may be killed at its end.
        self.shell.events.register("post_run_cell", lambda _: provenance.write(job))
        atexit.register(provenance.write, job)
        os.write(self.report_pipe, b"!")
        os.close(self.report_pipe)
        super().start()  # type: ignore[no-untyped-call]

    def init_signal(self) -> None:
        """Do nothing: `_become_kernel` installed the SIGINT handler before signals could arrive."""

    def init_iopub(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Create the output socket with an unlimited queue."""
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)  # type: ignore[no-untyped-call]  # it has no type hints
        # At exit, Python calls atexit functions in reverse order, so `_end_control`, which is
        # registered last, is called first.
        atexit.register(self._end_control)

    def _end_control(self) -> None:
        if self.control_thread.is_alive():
            self.control_thread.stop()
            self.control_thread.join()


class ForkedKernel(Fork):
    """A forked process that waits for its arguments and then becomes a kernel."""

    def __init__(self) -> None:
        self._ready_pipe, report_pipe = os.pipe()
        super().__init__(partial(_become_kernel, report_pipe, os.getpid()))
        # The parent closes its copy of the pipe's writing end. With an open copy, the pipe would
        # stay open after the kernel ends.
        os.close(report_pipe)

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Send the kernel's arguments and environment to the forked process."""
        # The parent closes the pipe after the message, because the child reads until the end of the
        # file.
        with self.stdin:
            json.dump([arguments, environment], self.stdin)

    async def wait_until_reachable(self) -> None:
        """Wait until the kernel has bound its sockets, or until it has ended.

        Raises:
            RuntimeError: Within `START_TIMEOUT` seconds, the kernel neither bound its sockets nor
                ended.
        """
        loop, reachable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ready_pipe, reachable.set)
        try:
            await asyncio.wait_for(reachable.wait(), START_TIMEOUT)
        except TimeoutError:
            raise RuntimeError(
                f"the kernel cannot be reached {START_TIMEOUT:g} s after its start; check "
                "IPython's startup files"
            ) from None
        finally:
            loop.remove_reader(self._ready_pipe)
            os.close(self._ready_pipe)


class Provisioner(LocalProvisioner):
    """A jupyter_client provisioner that starts a ForkedKernel and sends signals to it."""

    embryo: ForkedKernel

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Turn the forked process into the kernel, and wait until clients can connect."""
        # The code omits interpreter and module from the sent command, because the forked process
        # already runs them.
        self.embryo.launch(cmd[cmd.index("ipykernel_launcher") + 1 :], kwargs["env"])
        self.process = self.embryo
        self.pid = self.pgid = self.embryo.pid
        # A client that connects before the kernel is reachable would be refused, and would retry
        # after 100 ms. The kernel is about to bind a port. A client that connects too early could
        # use the same port as its source port.
        await self.embryo.wait_until_reachable()
        return self.connection_info


class Client(AsyncKernelClient):
    """A kernel client that waits only for the kernel's welcome message, and loses no output.

    The client of jupyter_client polls until a message arrives. The client then waits until no
    message arrives for 0.2 s. The wait of 0.2 s is necessary for kernels of older versions, which
    send no welcome message.
    """

    def _context_default(self) -> zmq.asyncio.Context:
        self._created_context = True
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.RCVHWM, 0)
        return context

    async def wait_for_ready(self, timeout: float | None = None) -> None:
        """Wait for the kernel's welcome message, after which no output can be lost.

        Raises:
            RuntimeError: The kernel has ended, or has sent no welcome message within `timeout`
                seconds.
        """
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while True:
            try:
                message = await self.get_iopub_msg(timeout=1)
            except Empty:
                if not await self.is_alive():
                    raise RuntimeError("the kernel has ended before it was ready") from None
                if time.monotonic() > end:
                    raise RuntimeError(f"the kernel was not ready within {timeout} s") from None
            else:
                if message["msg_type"] == "iopub_welcome":
                    return


def _end_statement(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: interrupt a running statement so that it cleans up; end an idle process."""
    # While an asynchronous cell waits, ipykernel replaces the SIGINT handler. An exception would
    # then end the kernel's event loop.
    if Shell.executing and signal.getsignal(signal.SIGINT) == Shell.interrupt:
        terminate(number, frame)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Ignore SIGTERM, because the job's process also receives and handles this signal."""


def _become_kernel(report_pipe: int, job: int, orders: int) -> int:
    """Read the arguments from a pipe, run the kernel, and then call the atexit functions."""
    with os.fdopen(orders) as pipe:
        text = pipe.read()
    # If the job's process has already ended, the kernel must not start. Otherwise, the kernel would
    # monitor the wrong parent process.
    if not text or os.getppid() != job:
        return 0
    # Standard input belongs to the job's process. A cell that reads standard input gets an end of
    # file.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    arguments, environment = json.loads(text)
    # The environment that arrives through the pipe is complete, so all other variables are removed.
    os.environ.clear()
    os.environ.update(environment)
    # `prepare` has blocked the import of the module `rfc3987_syntax`. The kernel allows the import
    # of `rfc3987_syntax` again for notebooks.
    sys.modules.pop("rfc3987_syntax", None)
    if numpy_random := sys.modules.get("numpy.random"):
        # Without a new seed, all notebooks of a sweep would draw the same random numbers.
        numpy_random.seed()

    # Slurm sends SIGTERM to all processes of an array task at the same time. After SIGTERM, the
    # job's process interrupts the cell. After SIGTERM, the kernel must continue, to report the
    # output of the cleanup. The kernel does not use SIG_IGN for SIGTERM, because child processes of
    # cells would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, _ignore_signal if ELEMENT in os.environ else _end_statement)
    signal.signal(signal.SIGINT, Shell.interrupt)
    # IPython's warning "To exit: use …" is hidden, because it is meant for interactive users.
    warnings.filterwarnings("ignore", "To exit: use")
    sys.argv = ["labkit.jobs.kernel", *arguments]
    imports.append_inherited()
    provenance.forget()
    # The parent's process id is an argument, not an environment variable. ipykernel would read the
    # environment variable at import, before the fork.
    LosslessKernel.launch_instance(
        arguments, parent_handle=job, report_pipe=report_pipe, ignore_cwd=True
    )
    # A forked process ends with `os._exit`, which skips atexit functions, so the code calls them
    # itself. One of the atexit functions ends the notebook's cluster.
    atexit._run_exitfuncs()
    return 0
