"""Forked processes that inherit all imports of their parent and start without delay."""

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

BROKEN = 70  # exit code after an error in labkit's own code


class Fork:
    """A forked process with the interface of `Popen`.

    The child reads from a pipe whose only writing end, `stdin`, belongs to the parent. When the
    parent ends for any reason, the pipe closes, so the child notices it.

    Args:
        act: Function that the child runs. Its argument is the reading end of the pipe; its return
            value is the exit code.
    """

    stdout = stderr = None
    # Each child closes its copies of the pipes to earlier children. With open copies, an earlier
    # child would not notice that the parent closes its pipe.
    _pipes: ClassVar[WeakSet[TextIO]] = WeakSet()

    def __init__(self, act: Callable[[int], int]) -> None:
        sys.stdout.flush()  # without a flush, both processes would write the buffered text
        sys.stderr.flush()
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "w")
        # The set has weak references, so that it does not keep the pipe of a deleted Fork open.
        self._pipes.add(self.stdin)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for pipe in self._pipes:
                pipe.close()
            _run_child(act, reading)
        os.close(reading)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        if self.returncode is None:
            # After the process has ended, waitpid must not be called again: its id may be reused.
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
            # The system does not reuse the process id before `poll` has collected the process.
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)


def _run_child(act: Callable[[int], int], reading: int) -> NoReturn:
    """Run a function and always exit, because the callers on the stack belong to the parent."""
    code = BROKEN
    # The child must not destroy objects that it inherited. Libraries that have threads in the
    # parent, such as TensorFlow, abort or hang if the child destroys their objects.
    gc.freeze()
    try:
        os.setsid()  # only the parent receives Ctrl-C from the terminal

        # The child of a sweep inherits handlers that only count these signals
        # (`labkit.jobs.interrupts`).
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
            # sys.exit would run `finally` blocks and atexit functions of the parent.
            os._exit(code)
