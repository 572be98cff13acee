"""The communication thread: serves a rank's buckets in one order that is the same on all ranks."""

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

SLICE = 100_000  # ns, the least that Linux allows
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


class Service:
    """One thread that exchanges buckets while the training step goes on.

    Buckets are served in a fixed order, whatever order they become ready in, so the ranks' threads
    always work on the same bucket and cannot wait for each other in a circle. An error of the
    thread is raised in whoever waits for a bucket.

    Args:
        serve: exchanges bucket number b; runs in the thread.
        order: bucket numbers, each once.
        timeline: records `communicate` and `wait`.
        attend: told when the training step begins to stand still for a bucket (True), and when it
            goes on (False): meanwhile the thread need not leave the core to it.
    """

    def __init__(
        self,
        serve: Serve,
        order: Sequence[int],
        timeline: Timeline,
        attend: Callable[[bool], None] = lambda waiting: None,
    ) -> None:
        self._serve, self.order, self._timeline = serve, list(order), timeline
        self._clock = timeline.clock
        self._attend = attend
        self._changed = threading.Condition()
        self._issued: set[int] = set()
        self._serving = False
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._rounds = 0
        self._reorder: tuple[int, Reorder] | None = None
        self._ready = [0.0] * len(self.order)  # seconds; when buckets were issued, in sum
        self._seconds = [0.0] * len(self.order)  # what serving them took, in sum

    def reorder_after(self, rounds: int, reorder: Reorder) -> None:
        """Ask for another order once, when each bucket has been served so often.

        `reorder` gets the mean times at which buckets were issued, from the first on, and how
        long serving them took; it is called in the threads of all ranks after the same round.
        """
        self._reorder = (rounds, reorder)

    def issue(self, bucket: int) -> None:
        """Hand a packed bucket to the thread."""
        with self._changed:
            self._done.discard(bucket)  # of a step that failed before it waited
            self._issued.add(bucket)
            self._ready[bucket] += self._clock.now()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, bucket: int) -> None:
        """Back when the bucket holds the mean of all ranks; it may then be issued again."""
        start = self._clock.now()
        self._attend(True)
        with self._changed:
            while bucket not in self._done and self._error is None:
                self._changed.wait()
            self._done.discard(bucket)
        self._attend(False)
        self._timeline.add("wait", bucket, start)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Back when the thread has ended; what it waits for has been called off."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def settle(self) -> None:
        """Back when every issued bucket is served: the thread then uses no communicator."""
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
        """Each bucket has been served once more; before the last one counts as done."""
        self._rounds += 1
        if self._reorder is not None and self._rounds == self._reorder[0]:
            first = min(self._ready)
            self.order = self._reorder[1](
                [(at - first) / self._rounds for at in self._ready],
                [took / self._rounds for took in self._seconds],
            )


def wake_promptly() -> bool:
    """Ask Linux for short slices of the core for the calling thread; whether it agreed.

    Where all cores compute, a thread that wakes waits until another's slice ends, about 3 ms, for
    every message; one with a shorter slice goes first (Linux 6.12 and later). It gets no larger
    share of the core. Elsewhere nothing changes.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, 0, 0, SLICE, 0, 0)
    done: int = ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)
    return done == 0
