"""The kernel that executes jobs: there at once, it drops no output, and interrupts wait for it.

An interpreter that starts anew for each notebook spends two seconds on the same imports. Here a
process is forked that has done them, before it has any thread or socket, and waits for its orders.
It is a process of its own as any kernel is; it shares with others only memory pages never written.
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
from asyncio import Future
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from labkit.records.endings import terminate
from labkit.records.store import ELEMENT

# A job is not debugged, and the debugger takes longer to import than all else: ipykernel, which
# looks for it once, shall not find it.
if "debugpy" not in sys.modules:
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    import ipykernel.debugger  # noqa: F401

    del sys.modules["debugpy"]

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell

STARTS = 60.0  # seconds that a kernel has to come up, as papermill gives it


class Shell(ZMQInteractiveShell):
    """IPython's shell, which an interrupt strikes in a statement of a cell, or before the next one.

    ipykernel ignores those that come between cells, and where one strikes as it prepares a cell or
    its answer, it never answers.

    Attributes:
        executing: whether a statement is executed.
        asked: whether an interrupt waits for one.
    """

    executing = asked = False

    @classmethod
    def interrupt(cls, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        if cls.executing:
            raise KeyboardInterrupt
        cls.asked = True

    async def run_code(
        self, code_obj: CodeType, result: Any = None, *, async_: bool = False
    ) -> bool:
        """Execute statements; whether they failed."""
        # Of the class: signals come to the process, and before there is a shell.
        outer, Shell.executing = Shell.executing, True
        try:
            if Shell.asked:
                Shell.asked = False
                raise KeyboardInterrupt
            failed: bool = await super().run_code(code_obj, result, async_=async_)
            return failed
        finally:
            Shell.executing = outer


class Interrupted(IPythonKernel):
    """IPython's kernel, which leaves interrupts to its shell."""

    shell_class = Type(Shell)

    def pre_handler_hook(self) -> None:
        """Leave it to the shell again, whatever a cell has made of the signal."""
        signal.signal(signal.SIGINT, Shell.interrupt)

    post_handler_hook = pre_handler_hook

    @contextmanager
    def _cancel_on_sigint(self, future: Future[Any]) -> Iterator[None]:
        """Cancel an asynchronous cell; where it succeeds all the same, strike the next one."""
        struck = False

        def strike(number: int, frame: FrameType | None) -> None:
            nonlocal struck
            struck = True
            cancel(number, frame)

        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)  # before `strike` can be called
            signal.signal(signal.SIGINT, strike)
            yield
        if struck and future.result().success:
            Shell.asked = True


class LosslessKernel(IPKernelApp):
    """IPython's kernel with room for any number of outputs that wait for a slow reader.

    ZeroMQ keeps 1,000 messages for a subscriber and drops what comes after them: outputs of a
    chatty cell, and among them the word that the cell has ended.

    Its threads end in the order in which they need each other: the one that is told to shut down
    hands over its last outputs, and would wait 10 s for a thread of outputs that has ended.
    """

    kernel_class = Type(Interrupted)
    told = Integer(help="The writing end of a pipe that hears when the kernel can be reached.")

    def start(self) -> None:
        """Say that it can be reached, and serve."""
        os.write(self.told, b"!")
        os.close(self.told)
        super().start()  # type: ignore[no-untyped-call]

    def init_signal(self) -> None:
        """Interrupts are handled already: they may come before a kernel does."""

    def init_iopub(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Lift the limit before the socket for outputs is made, and its thread is started."""
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)  # type: ignore[no-untyped-call]  # ipykernel gives it none
        atexit.register(self._end_control)  # registered later than the end of outputs: done earlier

    def _end_control(self) -> None:
        if self.control_thread.is_alive():
            self.control_thread.stop()
            self.control_thread.join()


class ForkedKernel(Fork):
    """A forked process that waits to become a kernel."""

    def __init__(self) -> None:
        self._hears, told = os.pipe()
        super().__init__(partial(_become_kernel, told, os.getpid()))
        os.close(told)  # else the kernel's death would not close the pipe

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Become the kernel with these arguments."""
        # Closing ends the message: the embryo reads until the end.
        with self.stdin:
            json.dump([arguments, environment], self.stdin)

    async def listens(self) -> None:
        """Wait until its sockets are bound, or it has ended before.

        Raises:
            RuntimeError: neither is so within `STARTS` seconds.
        """
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._hears, heard.set)
        try:
            await asyncio.wait_for(heard.wait(), STARTS)
        except TimeoutError:
            raise RuntimeError(
                f"the kernel cannot be reached {STARTS:g} s after its start: see what IPython's "
                "startup files do"
            ) from None
        finally:
            loop.remove_reader(self._hears)
            os.close(self._hears)


class Provisioner(LocalProvisioner):
    """What jupyter_client starts and signals kernels with, here with a ForkedKernel."""

    embryo: ForkedKernel

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Let the embryo become the kernel."""
        # The rest of the command is an interpreter and a module, which the embryo is already.
        self.embryo.launch(cmd[cmd.index("ipykernel_launcher") + 1 :], kwargs["env"])
        self.process = self.embryo
        self.pid = self.pgid = self.embryo.pid
        # Who connects earlier is refused, tries again 100 ms later, and may be given, as the port
        # that it comes from, the very one that the kernel is about to bind.
        await self.embryo.listens()
        return self.connection_info


class Client(AsyncKernelClient):
    """The job's end: ready as soon as it hears the kernel, and it drops no output either.

    jupyter_client's asks until something is published and then waits for 0.2 s of silence, as older
    kernels do not greet who subscribes.
    """

    def _context_default(self) -> zmq.asyncio.Context:
        self._created_context = True
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.RCVHWM, 0)
        return context

    async def wait_for_ready(self, timeout: float | None = None) -> None:
        """Wait for the kernel's greeting: what it publishes from then on arrives.

        Raises:
            RuntimeError: the kernel has ended, or has not greeted within `timeout` seconds.
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


def _end(number: int, frame: FrameType | None) -> None:
    """Let a statement that is executed clean up; end where none is, as processes do."""
    # While an asynchronous cell waits, which has another handler, it would end the kernel's loop.
    if Shell.executing and signal.getsignal(signal.SIGINT) == Shell.interrupt:
        terminate(number, frame)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _stay(number: int, frame: FrameType | None) -> None:
    """Leave it to the job's process, which is told as well."""


def _become_kernel(told: int, job: int, orders: int) -> int:
    """Wait for the order, be the kernel, and end as an interpreter ends."""
    with os.fdopen(orders) as pipe:
        text = pipe.read()
    # The kernel looks for its job's end from its start on, and takes another parent for the job.
    if not text or os.getppid() != job:
        return 0
    arguments, environment = json.loads(text)
    # The orders hold the whole environment: what is absent there shall be absent here.
    os.environ.clear()
    os.environ.update(environment)
    sys.modules.pop("rfc3987_syntax", None)  # a notebook may want it
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # else all members of a sweep would draw the same numbers
    # Slurm tells all processes of an element at once; its job interrupts the cell, and this kernel
    # must be there to say that it has cleaned up. Ignored, it would be by what cells start, too.
    signal.signal(signal.SIGTERM, _stay if ELEMENT in os.environ else _end)
    signal.signal(signal.SIGINT, Shell.interrupt)
    sys.argv = ["labkit.jobs.kernel", *arguments]
    imports.add_inherited()
    # Given here, as ipykernel reads the variable when it is imported.
    LosslessKernel.launch_instance(arguments, parent_handle=job, told=told, ignore_cwd=True)
    # A fork ends by os._exit, which leaves these out; a notebook's cluster ends in one of them.
    atexit._run_exitfuncs()
    return 0
