"""The mean of the ranks' gradients, as operations of the training graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.content import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Aside, Communicator
from labkit.compression import Compressor, parse
from labkit.exchange.arena import Arena, Packing, Piece
from labkit.exchange.bucket import Bucket, holders, pack
from labkit.exchange.choice import Choice, Signature, agree, choose
from labkit.exchange.compressed import CompressedMean, Layer, Seen
from labkit.exchange.order import by_priority
from labkit.exchange.schedules import SCHEDULES
from labkit.exchange.service import Service
from labkit.exchange.timeline import Timeline

if TYPE_CHECKING:
    import tensorflow as tf

Rows: TypeAlias = "int | tf.Tensor | None"
BUCKET_BYTES = 4 * 2**20

Watcher = Callable[[int, Sequence[Layer], Seen], None]


class NotFinite(LabkitError):
    """A gradient is infinite or not a number, or becomes so, and a memory would keep it."""


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
        self.compressed: CompressedMean | None = None
        if self.compressor is not None:
            self.compressed = CompressedMean(communicator, self.compressor, seed)
        self.watchers: list[Watcher] = []
        self.timeline = Timeline(self.clock)
        self.choice = Choice(algorithm, "as asked for")
        self.buckets: list[Bucket] = []
        self._signature: Signature = []
        self._types: list[tf.DType] = []
        self._weights: dict[int, float] = {}
        self._steps: dict[int, int] = {}  # of training, in which each bucket was packed
        self._total: float | None = None
        self._scaled = False
        self._packings: list[Packing] = []
        self._pieces: dict[int, list[Piece] | None] = {}
        self._arena = Arena(communicator, [], [], [], common=False)
        self.service = Service(self._serve, [], self.timeline, self._attend)
        self._left = self.clock.now()  # the last exchange
        self._attend(self.schedule.after)
        communicator.pace(self.schedule.turns)

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
        if scale is None or self.compressor is None:
            return list(traced(gradients, rows, names))
        if not self.schedule.after:
            raise InvalidInput(
                f"schedule={self.schedule.name!r} with a compressor under loss scaling: a bucket "
                "would be sent before another one overflows, and what was sent of a step that is "
                "then skipped is lost; use schedule='sequential'"
            )
        self._scaled = True
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

        traced = self._signature

        def exchange(count: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            self._check_layout(traced)
            self._attend(True)  # another exchange of these ranks may have said otherwise
            self.communicator.pace(self.schedule.turns)
            for number, bucket in enumerate(self.buckets):
                self._pack(number, [arrays[slot.variable] for slot in bucket.slots], count)
            for number in range(len(self.buckets)):
                start = self.clock.now()
                self._serve(number)
                self.timeline.add("communicate", number, start)
                self.timeline.add("wait", number, start)
            return self._arena.means

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
                return self._arena.means[variable]

            _, shape, _ = self._signature[variable]
            with tf.control_dependencies(before):
                mean = tf.numpy_function(fetch, [], self._types[variable])
            before = [mean]
            means.append(tf.reshape(mean, shape))
        return means

    def _issue(self, number: int, gradients: list[tf.Tensor], rows: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        traced = self._signature

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
        if self.buckets and signature == self._signature:
            return
        agree(self.communicator, signature)
        if not signature:
            raise InvalidInput(
                "no variable has a gradient: is the loss made of the model's output?"
            )
        self._signature = signature
        lengths = [int(np.prod(shape)) for _, shape, _ in signature]
        dtypes = [np.dtype(g.dtype.as_numpy_dtype) for g in gradients]
        self.buckets = pack(
            lengths,
            [dtype.name for dtype in dtypes],
            [dtype.itemsize for dtype in dtypes],
            sum(lengths) * 8 + 1 if self.schedule.after else self.bucket_bytes,
            cut=not self.schedule.after and not (self.compressor and self.compressor.by_layer),
            groups=groups,
        )
        self._types = [g.dtype for g in gradients]
        self._weights = {}
        self.service = Service(self._serve, range(len(self.buckets)), self.timeline, self._attend)
        largest = max(bucket.nbytes for bucket in self.buckets)
        self.choice = choose(self.communicator, self.algorithm, largest, self.compressor is None)
        common = self.choice.in_place and self.compressed is None
        self._arena = Arena(self.communicator, lengths, dtypes, self.buckets, common)
        self._packings = [
            Packing(bucket, self._arena.gradients(bucket), self._stays(bucket))
            for bucket in self.buckets
        ]

    def by_priority(self, ready: list[float], seconds: list[float]) -> list[int]:
        """The order that serves front layers first, the same on all ranks (collective)."""
        told = self.communicator.allgather((ready, seconds), what="the order of the buckets")
        means = np.mean(told, axis=0)
        urgency = [min(slot.variable for slot in bucket.slots) for bucket in self.buckets]
        return by_priority(means[0].tolist(), means[1].tolist(), urgency)

    def _pack(self, number: int, arrays: Sequence[np.ndarray], count: np.ndarray) -> None:
        """Copy gradients into their bucket, and keep their weight."""
        start = self.clock.now()
        self._weights[number] = float(count)
        self._steps[number] = self.timeline.step
        self._pieces[number] = self._packings[number](arrays, bool(count))
        self.timeline.add("pack", number, start)

    def _check_layout(self, traced: Signature) -> None:
        """Refuse a step that was traced before another one laid out the buckets anew."""
        if traced is not self._signature:
            raise InvalidInput(
                "two compiled training steps with different variables share one distributed "
                "optimizer; give each step an optimizer of its own"
            )

    def _attend(self, standing: bool) -> None:
        """While the training step stands still, waits may take its core."""
        self.communicator.patience.polite = not standing

    def _stays(self, bucket: Bucket) -> slice:
        """What this rank adds up itself of a bucket, if it need not be copied for that."""
        in_place = self.schedule.after and self.choice.in_place
        if not in_place or self.compressed is not None:
            return slice(0, 0)
        return self.communicator.own_part(bucket.length)

    def _serve(self, number: int) -> None:
        if number == 0 and self._paces:
            self.communicator.act_slow(self.clock.now() - self._left)
        if self.compressed is not None:
            self._serve_compressed(number, self.compressed)
            return
        bucket, what = self.buckets[number], "the exchange of gradients"
        if number == self.service.order[0] and not self.choice.in_place:
            self._total = self.communicator.total(self._weights[number], what)  # of all buckets
        self.communicator.mean(
            self._arena.gradients(bucket),
            self._weights[number],
            self.choice.algorithm,
            what,
            self._total,
            Aside(self._pieces.pop(number, None), self._arena.into(bucket)),
        )
        self._left = self.clock.now()

    def _serve_compressed(self, number: int, compressed: CompressedMean) -> None:
        bucket, what = self.buckets[number], "the exchange of compressed gradients"
        pieces, layers = self._pieces_of(bucket)
        told = self.communicator.allgather((self._weights[number], _trouble(pieces, layers)), what)
        troubles = [f"{name} on rank {rank}" for rank, (_, name) in enumerate(told) if name]
        if troubles and not self._scaled:
            raise NotFinite(
                f"the gradient of {', '.join(troubles)} is infinite or not a number; lower the "
                "learning rate, or clip gradients (clipnorm)"
            )
        if troubles:  # an overflow: every rank skips the step, and no memory keeps it
            for piece in pieces:
                piece[...] = np.nan
            self._left = self.clock.now()
            return
        total = sum(weight for weight, _ in told)
        share = self._weights[number] * self.communicator.size / total if total else 0.0
        for piece in pieces:
            piece *= piece.dtype.type(share)
        seen = compressed.reduce(number, pieces, layers, self.choice.algorithm, what)
        # The mean is the same on all ranks, and so is what they do now.
        if lost := _trouble([seen.mean[one.start : one.stop] for one in layers], layers):
            raise NotFinite(
                f"the gradient of {lost} is finite, but {self.compressor!r} makes it infinite or "
                "not a number: its values are too large for the method; lower the learning rate, "
                "clip gradients (clipnorm), or take another compressor"
            )
        for watcher in self.watchers:
            # By now some ranks may have begun the next step: watchers must agree on this one.
            watcher(number, layers, replace(seen, step=self._steps[number]))
        self._left = self.clock.now()

    def _pieces_of(self, bucket: Bucket) -> tuple[list[np.ndarray], list[Layer]]:
        """The gradients of a bucket in the order of their places, and what they are."""
        pieces: list[np.ndarray] = []
        layers: list[Layer] = []
        stop = 0
        for slot in sorted(bucket.slots, key=lambda slot: slot.offset):
            name, shape, _ = self._signature[slot.variable]
            whole = slot.length == int(np.prod(shape))
            start, stop = stop, stop + slot.length
            layers.append(Layer(name, start, stop, shape if whole else (slot.length,)))
            pieces.append(self._arena.piece(bucket, slot))
        return pieces, layers


def _trouble(pieces: Sequence[np.ndarray], layers: Sequence[Layer]) -> str:
    """The first layer with a value that is not finite, or ""."""
    for piece, layer in zip(pieces, layers, strict=True):
        # One pass; it may overflow, so look again.
        if not np.isfinite(np.dot(piece, piece)) and not np.isfinite(piece).all():
            return layer.name
    return ""


def _shaped(means: tf.Tensor | list[tf.Tensor], gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    import tensorflow as tf

    found = means if isinstance(means, list | tuple) else [means]
    return [tf.reshape(mean, g.shape) for mean, g in zip(found, gradients, strict=True)]
