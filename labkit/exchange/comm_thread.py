"""The communication thread, which exchanges buckets in a fixed order, the same on all ranks."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable, Sequence

from labkit.exchange.timeline import Timeline

Serve = Callable[[int], None]
Reorder = Callable[[list[float], list[float]], list[int]]

TIME_SLICE = 100_000  # ns, the smallest time slice that Linux allows
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


class CommThread:
    """A thread that exchanges buckets during the training step.

    The order of the buckets is fixed, even if the training step issues them in a different order.
    Therefore the threads of all ranks exchange the same bucket at a time, which avoids deadlocks.
    If the thread fails, `wait` raises the thread's error in the training step.

    Args:
        serve: A function that exchanges the bucket with a given number; the thread calls it.
        order: The numbers of all buckets, in the order of their exchange.
        timeline: The timeline in which events of the kinds "communicate" and "wait" are recorded.
        on_block: A callback that is told when the training step starts and stops waiting. The
            callback receives True when the training step starts to wait for a bucket, and False
            when the step continues. Between these two calls, the communication thread may use the
            core fully.
    """

    def __init__(
        self,
        serve: Serve,
        order: Sequence[int],
        timeline: Timeline,
        on_block: Callable[[bool], None] = lambda waiting: None,
    ) -> None:
        self._serve, self.order, self._timeline = serve, list(order), timeline
        self._clock = timeline.clock
        self._set_blocked = on_block
        self._changed = threading.Condition()
        self._issued: set[int] = set()
        self._serving = False
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._rounds = 0
        self._reorder: tuple[int, Reorder] | None = None
        # `_ready` contains, for each bucket, the sum of its issue times in seconds.
        self._ready = [0.0] * len(self.order)
        # `_seconds` contains, for each bucket, the sum of its exchange durations in seconds.
        self._seconds = [0.0] * len(self.order)

    def reorder_after(self, rounds: int, reorder: Reorder) -> None:
        """Change the order of the buckets once, after a number of rounds.

        The communication threads of all ranks call `reorder` after the same round.

        Args:
            rounds: The number of rounds before the change; a round exchanges every bucket once.
            reorder: A function of (mean issue times, mean exchange durations) of all buckets, in
                seconds, which returns the new order. Issue times are measured from the first issued
                bucket.
        """
        self._reorder = (rounds, reorder)

    def issue(self, bucket: int) -> None:
        """Pass a packed bucket to the communication thread, which exchanges it."""
        with self._changed:
            self._done.discard(bucket)  # a failed step may have left the bucket in `_done`
            self._issued.add(bucket)
            self._ready[bucket] += self._clock.now()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, bucket: int) -> None:
        """Wait until a bucket contains the mean over ranks; then the bucket may be issued again."""
        start = self._clock.now()
        self._set_blocked(True)
        with self._changed:
            while bucket not in self._done and self._error is None:
                self._changed.wait()
            self._done.discard(bucket)
        self._set_blocked(False)
        self._timeline.add("wait", bucket, start)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; the caller must first have aborted the thread's current collective."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> None:
        """Wait until all issued buckets are exchanged and the thread does not communicate."""
        with self._changed:
            while (self._issued or self._serving) and self._error is None:
                self._changed.wait()

    def _work(self) -> None:
        wake_promptly()
        try:
            while True:
                for bucket in list(self.order):
                    with self._changed:
                        while bucket not in self._issued and not self._closed:
                            self._changed.wait()
                        if self._closed:
                            return
                        self._issued.discard(bucket)
                        self._serving = True
                    start = self._clock.now()
                    self._serve(bucket)
                    self._timeline.add("communicate", bucket, start)
                    self._seconds[bucket] += self._clock.now() - start
                    if bucket == self.order[-1]:
                        self._end_round()
                    with self._changed:
                        self._done.add(bucket)
                        self._serving = False
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _end_round(self) -> None:
        """Count a round; after the round given to `reorder_after`, change the bucket order."""
        self._rounds += 1
        if self._reorder is not None and self._rounds == self._reorder[0]:
            first = min(self._ready)
            self.order = self._reorder[1](
                [(ready - first) / self._rounds for ready in self._ready],
                [seconds / self._rounds for seconds in self._seconds],
            )


def wake_promptly() -> bool:
    """Request short scheduler time slices for the calling thread; return whether Linux agreed.

    If all cores are busy, a thread that wakes up for a message waits about 3 ms until another
    thread's time slice ends. Since Linux 6.12, a thread with shorter time slices runs first, but
    gets no larger share of the core. On other systems the function has no effect.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    # The bytes are Linux's struct sched_attr: size, policy, flags, nice, priority, runtime,
    # deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, 0, 0, TIME_SLICE, 0, 0)
    status: int = ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)
    return status == 0
