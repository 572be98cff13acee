"""The communication thread, which exchanges buckets in the same fixed order on all ranks."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.communicator import Clock
from labkit.exchange.bucket_layout import BucketLayout
from labkit.exchange.gradient import from_tensors, tensors_of

if TYPE_CHECKING:
    import tensorflow as tf


KINDS = ("step", "pack", "communicate", "wait")
# A timeline stores at most `MAX_EVENTS` events, and drops the oldest events of a long run.
MAX_EVENTS = 200_000

# An `Event` contains the kind, the training step, the bucket, the start time and the stop time.
Event = tuple[str, int, int, float, float]


class Timeline:
    """The events of this rank as (kind, step, bucket, start, stop), with clock times in seconds.

    An event with the kind `step` covers a whole training step. During an event with the kind
    `pack`, the rank copies gradients into a bucket. During an event with the kind `communicate`,
    the communication thread exchanges a bucket. During an event with the kind `wait`, the training
    step blocks until a bucket is complete. Outside `pack` and `wait` events, a training step
    computes. The times of ranks on the same host are comparable, because they use one clock.
    Recording an event takes much less than a microsecond.

    Attributes:
        events: The latest events, at most `MAX_EVENTS`.
        step: The number of the current training step.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.step = 0

    def add(self, kind: str, bucket: int, start: float) -> None:
        """Append an event that ends now to the events of the current step."""
        self.events.append((kind, self.step, bucket, start, self.clock.now()))

    def of_step(self, step: int) -> list[Event]:
        """Return the events of one training step."""
        return [event for event in self.events if event[1] == step]


def timeline_rows(timelines: Iterable[Iterable[Event]]) -> list[dict[str, Any]]:
    """Return the events of all ranks as rows with rank, kind, step, bucket, start and stop.

    Times are in seconds since the start of the first event.
    """
    events = [(rank, *event) for rank, timeline in enumerate(timelines) for event in timeline]
    begin = min((event[4] for event in events), default=0.0)
    names = ("rank", "kind", "step", "bucket", "start", "stop")
    return [
        dict(zip(names, (*event[:4], event[4] - begin, event[5] - begin), strict=True))
        for event in events
    ]


Serve = Callable[[int], None]
Reorder = Callable[[list[float], list[float]], list[int]]

TIME_SLICE = 100_000  # The smallest time slice that Linux allows is 100,000 ns.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


class CommThread:
    """A thread that exchanges buckets during the training step.

    The order of the buckets is fixed, even if the training step issues them in a different order.
    At any time, the threads of all ranks exchange the same bucket, which avoids deadlocks. If the
    thread fails, `wait` raises the thread's error in the training step.

    Args:
        serve: A function that exchanges the bucket with a given number; the thread calls it.
        order: The numbers of all buckets, in the order of their exchange.
        timeline: The timeline in which events of the kinds "communicate" and "wait" are recorded.
        on_block: A callback that is called when the training step starts and when it stops waiting.
            The callback receives True when the training step starts to wait for a bucket. The
            argument False means that the training step no longer waits. While the training step
            waits, the communication thread may use the core fully.
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
        # The list `_ready` contains a sum of clock times in seconds for each bucket. Each clock
        # time in `_ready` tells when the bucket was issued.
        self._ready = [0.0] * len(self.order)
        # The list `_seconds` contains, for each bucket, the total duration of the bucket's
        # exchanges in seconds.
        self._seconds = [0.0] * len(self.order)

    def reorder_after(self, rounds: int, reorder: Reorder) -> None:
        """Change the order of the buckets once, after a number of rounds.

        The communication threads of all ranks call `reorder` after the same round.

        Args:
            rounds: The number of rounds before the change; a round exchanges every bucket once.
            reorder: A function that returns the new order of all buckets. The function receives the
                mean issue time and the mean exchange duration of each bucket. Issue times count
                from the time at which the first bucket is issued.
        """
        self._reorder = (rounds, reorder)

    def issue(self, bucket: int) -> None:
        """Pass a packed bucket to the communication thread, which exchanges it."""
        with self._changed:
            # A failed training step may have left the bucket in the set `_done`.
            self._done.discard(bucket)
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
        """Count a round; change the bucket order after the round that `reorder_after` set."""
        self._rounds += 1
        if self._reorder is not None and self._rounds == self._reorder[0]:
            first = min(self._ready)
            self.order = self._reorder[1](
                [(ready - first) / self._rounds for ready in self._ready],
                [seconds / self._rounds for seconds in self._seconds],
            )


def wake_promptly() -> bool:
    """Request short scheduler time slices for the calling thread; return whether Linux grants them.

    If all cores are busy, a thread that wakes up waits about 3 ms. The thread waits until the time
    slice of another thread ends. Since Linux 6.12, a thread with shorter time slices runs first.
    Shorter time slices give a thread no larger share of the core. On systems other than Linux, the
    function has no effect.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    # The packed bytes form Linux's struct sched_attr: size, policy, flags, nice, priority, runtime,
    # deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, 0, 0, TIME_SLICE, 0, 0)
    status: int = ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0)
    return status == 0


@dataclass(frozen=True)
class Operations:
    """The TensorFlow operations in a training step that exchange one set of gradients.

    Attributes:
        layout: The layout of the gradients in parcels (a parcel is a bucket or a table).
        service: The communication thread, which exchanges buckets and tables during the training
            step.
        begin: A function that each step calls first, with the layout, and whether the step blocks.
        pack: A function that packs a bucket or a table. Its arguments are the parcel number, the
            gradients, and the number of samples.
        serve: A function that exchanges the parcel (bucket or table) with a given number. The
            training step blocks while the function `serve` exchanges the parcel.
    """

    layout: BucketLayout
    service: CommThread
    begin: Callable[[BucketLayout, bool], None]
    pack: Callable[[int, Sequence[np.ndarray], np.ndarray], None]
    serve: Callable[[int], None]

    def all_at_once(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Exchange all gradients in one TensorFlow operation after backpropagation."""
        layout = self.layout
        tensors = [tensors_of(gradient) for gradient in gradients]
        spans = _spans(tensors)

        def exchange(count: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            self.begin(layout, True)
            for number, members in enumerate(layout.parcels):
                self.pack(number, [a for v in members for a in arrays[spans[v]]], count)
            for number in range(len(layout.parcels)):
                self.serve(number)
            return [part for v in range(len(spans)) for part in layout.mean(v)]

        inputs = [tensor for parts in tensors for tensor in parts]
        outputs = _call(exchange, [rows, *inputs], self._types(range(len(spans))))
        pairs = zip(spans, layout.signature, strict=True)
        return [from_tensors(outputs[span], gradient) for span, gradient in pairs]

    def one_by_one(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Start to exchange each bucket or table when it is ready; then wait for all means."""
        import tensorflow as tf

        # A TensorFlow operation that waits for a mean gradient blocks one of TensorFlow's threads.
        # All buckets and tables must be issued before the first wait. Operations that wait may
        # block all of TensorFlow's threads.
        with tf.control_dependencies(self.issue(gradients, rows)):
            return self.wait(range(len(gradients)))

    def issue(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Return operations that each pass one bucket or table to the communication thread."""
        numbers = range(len(self.layout.parcels))
        return [self._issue(number, gradients, rows) for number in numbers]

    def wait(self, variables: Iterable[int]) -> list[tf.Tensor]:
        """Return tensors that wait for the exchange, and contain the variables' mean gradients."""
        import tensorflow as tf

        chosen = list(variables)
        # The dict `first` maps each parcel (bucket or table) to the first variable that waits for
        # the parcel.
        first: dict[int, int] = {}
        for variable in chosen:
            for number in self.layout.holders(variable):
                first.setdefault(number, variable)
        means: list[tf.Tensor] = []
        before: list[tf.Tensor] = []
        for variable in chosen:
            awaited = [number for number, waiter in first.items() if waiter == variable]

            def fetch(
                numbers: tuple[int, ...] = tuple(awaited), variable: int = variable
            ) -> list[np.ndarray]:
                for number in numbers:
                    self.service.wait(number)
                return self.layout.mean(variable)

            with tf.control_dependencies(before):
                before = _call(fetch, [], self._types([variable]))
            means.append(from_tensors(before, self.layout.signature[variable]))
        return means

    def _issue(self, number: int, gradients: list[tf.Tensor], rows: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        def issue(count: np.ndarray, *arrays: np.ndarray) -> np.int64:
            self.begin(self.layout, False)
            self.pack(number, arrays, count)
            self.service.issue(number)
            return np.int64(number)

        members = [gradients[variable] for variable in self.layout.parcels[number]]
        tensors = [tensor for gradient in members for tensor in tensors_of(gradient)]
        return tf.numpy_function(issue, [rows, *tensors], tf.int64)

    def _types(self, variables: Iterable[int]) -> list[str]:
        """Return the output dtypes of an operation that returns the variables' mean gradients."""
        chosen = [self.layout.signature[variable] for variable in variables]
        return [
            kind for gradient in chosen for kind in [gradient.dtype, "int32"][: 1 + gradient.rows]
        ]


def _call(
    function: Callable[..., list[np.ndarray]], inputs: list[tf.Tensor], types: list[str]
) -> list[tf.Tensor]:
    """Call a NumPy function in TensorFlow; return a list even if it has only one output."""
    import tensorflow as tf

    outputs = tf.numpy_function(function, inputs, types)
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _spans(tensors: Sequence[Sequence[tf.Tensor]]) -> list[slice]:
    """Return, for each gradient, the slice of its tensors in the flat list of all tensors."""
    ends = np.cumsum([len(parts) for parts in tensors]).tolist()
    return [slice(end - len(parts), end) for end, parts in zip(ends, tensors, strict=True)]
