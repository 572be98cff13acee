"""A process forked from one that has imported everything, and so is at work at once."""

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

BROKEN = 70  # exit code of a process that failed in labkit's own code


class Fork:
    """A forked process, to its parent what `Popen` is.

    It has the reading end of a pipe of which the parent alone has the other, `stdin`. So it hears
    of the parent's end, in whatever way that ends.

    Args:
        act: what it does; takes the pipe's reading end, returns the exit code.
    """

    stdout = stderr = None
    # What a fork inherits of the pipes to earlier ones, it closes: else those would not hear.
    _pipes: ClassVar[WeakSet[TextIO]] = WeakSet()

    def __init__(self, act: Callable[[int], int]) -> None:
        sys.stdout.flush()  # else both processes would write what waits
        sys.stderr.flush()
        reading, writing = os.pipe()
        self.stdin = os.fdopen(writing, "w")
        # Weak: a pipe whose Fork is gone is closed anyway, and shall not be kept open by this list.
        self._pipes.add(self.stdin)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for pipe in self._pipes:
                pipe.close()
            _be(act, reading)
        os.close(reading)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            # Asked once only after the end: the number then belongs to whoever gets it next.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # No race with another process of this number: it stays ours until `poll` has collected
            # it.
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _be(act: Callable[[int], int], reading: int) -> NoReturn:
    """Act, and end whatever happens: what stands below on the stack is the parent's work."""
    code = BROKEN
    # What the parent has left behind is the parent's to clean up: libraries that had threads there,
    # as TensorFlow, abort or wait for ever when a fork destroys what is theirs.
    gc.freeze()
    try:
        os.setsid()  # Ctrl-C in the terminal is for the parent
        # A sweep counts these signals instead (Scheduler._signals); its handlers are inherited.
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
            # Not sys.exit: the parent's `finally` blocks and atexit functions are on this stack,
            # too.
            os._exit(code)
