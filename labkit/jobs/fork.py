"""Forked processes, which inherit all imports of the parent and thus start without delay."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import ClassVar, NoReturn, TextIO
from weakref import WeakSet

BROKEN = 70  # A forked process exits with the code 70 after an error in the code of labkit.


class Fork:
    """A forked process with the same interface as `Popen`.

    The child reads from a pipe; only the parent has the pipe's writing end, `stdin`. When the
    parent ends for any reason, the pipe is closed, so that the child detects the end.

    Args:
        act: Function that the child calls. `act` takes the reading end of the pipe (a file
            descriptor), and returns the child's exit code.
    """

    stdout = stderr = None
    # `_pipes` contains the writing ends of the pipes to all child processes. Each new child process
    # closes the writing ends that it inherits from its parent. A later child process might keep a
    # copy of an earlier child's pipe. The earlier child would then not notice that the parent
    # closes the pipe.
    _pipes: ClassVar[WeakSet[TextIO]] = WeakSet()

    def __init__(self, act: Callable[[int], int]) -> None:
        # Without the flush, parent and child process would both write the buffered text.
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "w")
        # `_pipes` holds only weak references, so that a deleted `Fork` closes its pipe.
        self._pipes.add(self.stdin)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for pipe in self._pipes:
                pipe.close()
            _run_child(act, reading)
        os.close(reading)

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs."""
        if self.returncode is None:
            # The system may reuse the id of an ended process. The method must therefore not call
            # waitpid for an ended process again.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait until the process ends, and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            # The system cannot reuse the process id yet, because `poll` has not reaped the process.
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)


def _run_child(act: Callable[[int], int], reading: int) -> NoReturn:
    """Run a function and exit the child process, which must never return to the parent's code."""
    code = BROKEN
    # The child process must not destroy objects that it inherited from its parent. Some libraries,
    # such as TensorFlow, have threads in the parent. Such libraries abort or hang if the child
    # destroys their objects.
    gc.freeze()
    try:
        os.setsid()  # in a new session, the child does not receive Ctrl-C from the terminal

        # A child process of a sweep inherits handlers that only count SIGINT and SIGTERM. The child
        # therefore restores the default signal handlers.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = act(reading)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # The child process calls `os._exit`, because `sys.exit` would run the parent's
            # `finally` blocks and atexit functions.
            os._exit(code)
