"""The mean of the ranks' gradients, as operations of the training graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.content import JSON
from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.compression import Compressor, parse
from labkit.exchange.bucket import Bucket, holders
from labkit.exchange.choice import Choice, agree, choose
from labkit.exchange.layout import Layout, in_buckets
from labkit.exchange.order import by_priority
from labkit.exchange.reduction import BucketMean, Compressed, Plain, Watcher
from labkit.exchange.schedules import SCHEDULES
from labkit.exchange.service import Service
from labkit.exchange.timeline import Timeline

if TYPE_CHECKING:
    import tensorflow as tf

Rows: TypeAlias = "int | tf.Tensor | None"
BUCKET_BYTES = 4 * 2**20


class Exchange:
    r"""Replaces a rank's gradients by their mean over the ranks.

    With rows: \(\bar g = \sum_r b_r g_r / \sum_r b_r\), where \(g_r\) is the mean gradient of the
    \(b_r\) samples that rank r has seen, so that the result is the gradient of the global batch
    also where ranks hold unequal parts of it, or none. Without rows every rank counts the same.

    Gradients are copied once, into buckets that stay where they are (in shared memory where all
    ranks are on one host); the means are read there, without a copy, until the next step.

    Args:
        communicator: the ranks that take part.
        algorithm: how buckets are summed, see `Communicator.allreduce`; "auto": what is fastest
            here, by measurement.
        schedule: "sequential": all buckets after backpropagation; "overlap": each as soon as its
            gradients are there, while backpropagation goes on; "staggered": as sequential, and
            ranks take turns at links that they share; "priority": see `labkit.exchange.priority`.
        bucket_bytes: how many bytes of gradients travel together.
        compressor: how they are said in fewer bytes, a compressor or the name of one; None: as
            they are.
        seed: of the compressor's random choices.
        paces: whether all that lies between two exchanges is computation, which takes a slow rank
            of an emulated network longer.

    Attributes:
        timeline: what this rank did when.
        compressed: the reduction through the compressor, or None.
        watchers: called with what each compressed bucket was and became.

    How the work is divided: a `Schedule` says when buckets travel, a `Layout` where they lie, a
    `BucketMean` what becomes of one, and the `Service` is the thread that serves them in turn.
    """

    def __init__(
        self,
        communicator: Communicator,
        algorithm: str = "auto",
        schedule: str = "sequential",
        bucket_bytes: int = BUCKET_BYTES,
        compressor: Compressor | Mapping[str, JSON] | str | None = None,
        seed: int = 0,
        paces: bool = True,
    ) -> None:
        if schedule not in SCHEDULES:
            raise InvalidInput(
                f"schedule={schedule!r} is not known; allowed: {', '.join(SCHEDULES)}"
            )
        self.schedule = SCHEDULES[schedule]
        self.communicator, self._paces = communicator, paces
        self.clock = communicator.clock
        self.algorithm, self.bucket_bytes = algorithm, bucket_bytes
        self.compressor = None if compressor is None else parse(compressor)
        self._compressed: Compressed | None = None
        self._reduce: BucketMean = Plain(communicator)
        if self.compressor is not None:
            self._reduce = self._compressed = Compressed(communicator, self.compressor, seed)
        self.compressed = self._compressed.mean if self._compressed else None
        self.watchers: list[Watcher] = self._compressed.watchers if self._compressed else []
        self.timeline = Timeline(self.clock)
        self._layout = Layout(communicator, [], [], [], Choice(algorithm, "as asked for"))
        self._types: list[tf.DType] = []
        self.service = Service(self._serve, [], self.timeline, self._attend)
        self._left = self.clock.now()  # the last exchange
        self._attend(self.schedule.after)
        communicator.pace(self.schedule.turns)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """What travels together; nothing before the first step is traced."""
        return self._layout.buckets

    def length(self, variable: int) -> int:
        """Elements of a gradient, by its number among those that there are."""
        return int(np.prod(self._layout.signature[variable][1]))

    @property
    def choice(self) -> Choice:
        """How buckets are summed, and why so."""
        return self._layout.choice

    def mean(
        self,
        gradients: Sequence[tf.Tensor | None],
        rows: Rows = None,
        names: Sequence[str] = (),
        scale: tf.Tensor | None = None,
    ) -> list[tf.Tensor | None]:
        """The mean gradients, in the order given; called while the training step is traced.

        Args:
            gradients: tensors, `IndexedSlices` (made dense) or None (stays None).
            rows: scalar tensor, the number of samples behind this rank's gradients.
            names: of the variables, for messages.
            scale: scalar tensor, by which the loss was multiplied; compressors see gradients
                without it, because it changes while they remember.

        Raises:
            Mismatch: ranks have other gradients than this one.
            NotFinite: a gradient to be compressed is not finite, and there is no scale to blame;
                or it is, and its compressed mean is not.
        """
        import tensorflow as tf

        if self.communicator.size == 1 and self.compressor is None:
            return list(gradients)
        traced = tf.autograph.experimental.do_not_convert(self._mean)
        if scale is None or self._compressed is None:
            return list(traced(gradients, rows, names))
        if not self.schedule.after:
            raise InvalidInput(
                f"schedule={self.schedule.name!r} with a compressor under loss scaling: a bucket "
                "would be sent before another one overflows, and what was sent of a step that is "
                "then skipped is lost; use schedule='sequential'"
            )
        self._compressed.scaled = True
        plain = [None if g is None else g / tf.cast(scale, g.dtype) for g in gradients]
        means = traced(plain, rows, names)
        return [None if mean is None else mean * tf.cast(scale, mean.dtype) for mean in means]

    def _mean(
        self, gradients: Sequence[tf.Tensor | None], rows: Rows, names: Sequence[str]
    ) -> list[tf.Tensor | None]:
        import tensorflow as tf

        index = [i for i, g in enumerate(gradients) if g is not None]
        dense = [tf.convert_to_tensor(gradients[i]) for i in index]
        self.prepare(dense, [names[i] if i < len(names) else f"gradient {i}" for i in index])
        count = tf.constant(1, tf.int64) if rows is None else tf.cast(rows, tf.int64)
        exchange = self._all_at_once if self.schedule.after else self._one_by_one
        means = dict(zip(index, exchange(dense, count), strict=True))
        return [means.get(i) for i in range(len(gradients))]

    def describe(self) -> dict[str, JSON]:
        """What was chosen, for the record."""
        return {
            "algorithm": self.choice.algorithm,
            "why": self.choice.why,
            "schedule": self.schedule.name,
            "bucket_bytes": [bucket.nbytes for bucket in self.buckets],
            "compressor": None if self.compressor is None else self.compressor.to_json(),
        }

    def _all_at_once(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """One operation after backpropagation: pack, sum, hand out."""
        import tensorflow as tf

        traced = self._layout

        def exchange(count: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            self._check_layout(traced)
            self._attend(True)  # another exchange of these ranks may have said otherwise
            self.communicator.pace(self.schedule.turns)
            for number, bucket in enumerate(traced.buckets):
                self._pack(number, [arrays[slot.variable] for slot in bucket.slots], count)
            for number in range(len(traced.buckets)):
                start = self.clock.now()
                self._serve(number)
                self.timeline.add("communicate", number, start)
                self.timeline.add("wait", number, start)
            return traced.means

        means = tf.numpy_function(exchange, [rows, *gradients], [g.dtype for g in gradients])
        return _shaped(means, gradients)

    def _one_by_one(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """An issue operation for each bucket, run when its gradients are there; then the waits."""
        import tensorflow as tf

        # Waits stand still in a thread of TensorFlow's: none before the last issue.
        with tf.control_dependencies(self.issue(gradients, rows)):
            return self.wait(range(len(gradients)))

    def issue(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Operations that hand each bucket to the communication thread; their tokens."""
        return [self._issue(number, gradients, rows) for number in range(len(self.buckets))]

    def wait(self, variables: Iterable[int]) -> list[tf.Tensor]:
        """The means of these variables, as soon as the last of their buckets is there."""
        import tensorflow as tf

        chosen = list(variables)
        first: dict[int, int] = {}  # each bucket is waited for once, by the first variable in it
        for variable in chosen:
            for number in holders(self.buckets, variable):
                first.setdefault(number, variable)
        means: list[tf.Tensor] = []
        before: list[tf.Tensor] = []
        for variable in chosen:
            own = [number for number, waiter in first.items() if waiter == variable]

            def fetch(
                numbers: tuple[int, ...] = tuple(own), variable: int = variable
            ) -> np.ndarray:
                for number in numbers:
                    self.service.wait(number)
                return self._layout.means[variable]

            _, shape, _ = self._layout.signature[variable]
            with tf.control_dependencies(before):
                mean = tf.numpy_function(fetch, [], self._types[variable])
            before = [mean]
            means.append(tf.reshape(mean, shape))
        return means

    def _issue(self, number: int, gradients: list[tf.Tensor], rows: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        traced = self._layout

        def issue(count: np.ndarray, *arrays: np.ndarray) -> np.int64:
            self._check_layout(traced)
            self._pack(number, arrays, count)
            self.service.issue(number)
            return np.int64(number)

        own = [gradients[slot.variable] for slot in self.buckets[number].slots]
        return tf.numpy_function(issue, [rows, *own], tf.int64)

    def prepare(
        self, gradients: list[tf.Tensor], names: list[str], groups: Sequence[int] | None = None
    ) -> None:
        """Lay out the buckets; all ranks must have the same ones.

        Args:
            gradients: tensors, or the variables that they are of.
            names: for messages.
            groups: of each gradient; those of one group are waited for together.
        """
        signature = [
            (name, tuple(g.shape.as_list()), g.dtype.name)
            for name, g in zip(names, gradients, strict=True)
        ]
        if self.buckets and signature == self._layout.signature:
            return
        agree(self.communicator, signature)
        if not signature:
            raise InvalidInput(
                "no variable has a gradient: is the loss made of the model's output?"
            )
        after, compressor = self.schedule.after, self.compressor
        limit = None if after else self.bucket_bytes
        by_layer = compressor is not None and compressor.by_layer
        dtypes = [np.dtype(g.dtype.as_numpy_dtype) for g in gradients]
        buckets = in_buckets(signature, dtypes, limit, cut=not (after or by_layer), groups=groups)
        self._types = [g.dtype for g in gradients]
        self.service = Service(self._serve, range(len(buckets)), self.timeline, self._attend)
        largest, dense = max(bucket.nbytes for bucket in buckets), compressor is None
        choice = choose(self.communicator, self.algorithm, largest, dense)
        self._layout = Layout(self.communicator, signature, dtypes, buckets, choice, dense, after)

    def by_priority(self, ready: list[float], seconds: list[float]) -> list[int]:
        """The order that serves front layers first, the same on all ranks (collective)."""
        told = self.communicator.allgather((ready, seconds), what="the order of the buckets")
        means = np.mean(told, axis=0)
        urgency = [min(slot.variable for slot in bucket.slots) for bucket in self.buckets]
        return by_priority(means[0].tolist(), means[1].tolist(), urgency)

    def _pack(self, number: int, arrays: Sequence[np.ndarray], count: np.ndarray) -> None:
        start = self.clock.now()
        self._layout.pack(number, arrays, count, self.timeline.step)
        self.timeline.add("pack", number, start)

    def _check_layout(self, traced: Layout) -> None:
        """Refuse a step that was traced before another one laid out the buckets anew."""
        if traced is not self._layout:
            raise InvalidInput(
                "two compiled training steps with different variables share one distributed "
                "optimizer; give each step an optimizer of its own"
            )

    def _attend(self, standing: bool) -> None:
        """While the training step stands still, waits may take its core."""
        self.communicator.patience.polite = not standing

    def _serve(self, number: int) -> None:
        if number == 0 and self._paces:
            self.communicator.act_slow(self.clock.now() - self._left)
        self._reduce(self._layout, number, first=number == self.service.order[0])
        self._left = self.clock.now()


def _shaped(means: tf.Tensor | list[tf.Tensor], gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    import tensorflow as tf

    found = means if isinstance(means, list | tuple) else [means]
    return [tf.reshape(mean, g.shape) for mean, g in zip(found, gradients, strict=True)]
