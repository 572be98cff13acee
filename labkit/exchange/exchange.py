"""The mean of the ranks' gradients, as operations of the training graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.nearest import refuse_unknown
from labkit.common.quantities import parse_bytes
from labkit.communicator import Communicator
from labkit.compression import Compressor, parse
from labkit.exchange.autotune import LEAST, Choice, choose, no_core_is_free, rows_pay
from labkit.exchange.bucket import Bucket
from labkit.exchange.bucket_order import by_priority
from labkit.exchange.comm_thread import Service
from labkit.exchange.gradient import added_up, agree, dtypes_of, signature_of
from labkit.exchange.guard import BadNumbers, Guard
from labkit.exchange.layout import Layout, in_buckets
from labkit.exchange.operations import Operations
from labkit.exchange.reduction import BucketMean, Compressed, Plain, Watcher
from labkit.exchange.schedules import SCHEDULES
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
    `IndexedSlices` of a large table (an embedding) travel as rows, and come out as slices with
    each row once; where the table is small, or a compressor stands between, they are made dense.

    Args:
        communicator: the ranks that take part.
        algorithm: how buckets are summed, see `Communicator.allreduce`; "auto": what is fastest
            here, by measurement.
        schedule: "sequential": all buckets after backpropagation; "overlap": each as soon as its
            gradients are there, while backpropagation goes on (its end, where ranks of one host
            compute on all cores); "staggered": as sequential, and ranks take turns at links that
            they share; "priority": see `labkit.exchange.priority`.
        bucket_bytes: how many bytes of gradients travel together, a number or such as "4MiB".
        compressor: how they are said in fewer bytes, a compressor or the name of one; None: as
            they are.
        seed: of the compressor's random choices.
        paces: whether all that lies between two exchanges is computation, which takes a slow rank
            of an emulated network longer.
        guard: looks at gradients before they travel; None: nobody does. Where the loss is scaled,
            an overflow is no fault, and it does not look.
        eager: buckets of an overlap travel early also where no core is free.

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
        bucket_bytes: int | str = BUCKET_BYTES,
        compressor: Compressor | Mapping[str, JSON] | str | None = None,
        seed: int = 0,
        paces: bool = True,
        guard: Guard | None = None,
        eager: bool = False,
    ) -> None:
        refuse_unknown("schedule", [schedule], SCHEDULES)
        self.schedule = SCHEDULES[schedule]
        self.communicator, self._paces, self._eager = communicator, paces, eager
        self._after = self.schedule.after  # whether the step stands still for all buckets
        self.guard = guard
        self.clock = communicator.clock
        self.algorithm = algorithm
        self.bucket_bytes = parse_bytes(bucket_bytes, "bucket_bytes")
        self.compressor = None if compressor is None else parse(compressor)
        self._compressed: Compressed | None = None
        self._recalled: Choice | None = None
        self._reduce: BucketMean = Plain(communicator)
        if self.compressor is not None:
            self._reduce = self._compressed = Compressed(communicator, self.compressor, seed)
        self.compressed = self._compressed.mean if self._compressed else None
        self.watchers: list[Watcher] = self._compressed.watchers if self._compressed else []
        self.timeline = Timeline(self.clock)
        self._lay_out(Layout(communicator, [], [], [], Choice(algorithm, "as asked for")))
        self._restarts = communicator.restarts
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

    def bucket_of(self, name: str) -> int:
        """The bucket, or table, in which the first elements of a variable travel; -1: in none."""
        names = [[self._layout.signature[n].name for n in held] for held in self._layout.parcels]
        return next((number for number, held in enumerate(names) if name in held), -1)

    def names_in(self, bucket: int) -> list[str]:
        """The variables of a bucket."""
        return [self._layout.signature[n].name for n in self._layout.parcels[bucket]]

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
            gradients: tensors, `IndexedSlices` or None (stays None).
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

        if scale is not None:
            self.guard = None
        if self.communicator.size == 1 and self.compressor is None and not self._changes:
            whole = [added_up(gradient) for gradient in gradients]
            return whole if self.guard is None else self._looked_at(whole, names)
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
        given = [
            gradients[i] if self._as_rows(gradients[i]) else tf.convert_to_tensor(gradients[i])
            for i in index
        ]
        self.prepare(given, [names[i] if i < len(names) else f"gradient {i}" for i in index])
        count = tf.constant(1, tf.int64) if rows is None else tf.cast(rows, tf.int64)
        traced = self._operations
        exchange = traced.all_at_once if self._after else traced.one_by_one
        means = dict(zip(index, exchange(given, count), strict=True))
        return [means.get(i) for i in range(len(gradients))]

    @property
    def is_outdated(self) -> bool:
        """Whether the communicator has restarted since the layout: then call `reset`."""
        return self._restarts != self.communicator.restarts

    @property
    def may_skip(self) -> bool:
        """Whether steps may be left out."""
        return self.guard is not None and self.guard.policy == "skip"

    @property
    def _changes(self) -> bool:
        """Whether gradients may become others before they travel."""
        stops = self.guard is None or self.guard.policy == "stop"
        return not stops or self.communicator.rules.injector is not None

    def _looked_at(
        self, gradients: list[tf.Tensor | None], names: Sequence[str]
    ) -> list[tf.Tensor | None]:
        """Gradients that travel nowhere, behind an operation that looks at them."""
        import tensorflow as tf

        given = [(n, g) for n, g in zip(names, gradients, strict=False) if g is not None]
        paths = [path for path, _ in given[::-1]]

        def look(*arrays: np.ndarray) -> bool:
            self._guarded(paths, arrays)
            return True

        tensors = [tf.convert_to_tensor(gradient) for _, gradient in given[::-1]]
        with tf.control_dependencies([tf.numpy_function(look, tensors, tf.bool)]):
            return [None if g is None else tf.identity(g) for g in gradients]

    def all_finite(self, means: Sequence[tf.Tensor | None] = ()) -> tf.Tensor:
        """Whether the step may be taken: no rank has said of a gradient that it is bad.

        Args:
            means: of this step, as `mean` gave them.
        """
        import tensorflow as tf

        def look() -> bool:
            layout = self._layout
            slots = (slot for bucket in layout.buckets for slot in bucket.slots)
            # What one rank has spoilt is spoilt as a whole, on all ranks.
            dense = all(np.isfinite(layout.mean(s.variable)[0][s.start]) for s in slots)
            return dense and all(np.isfinite(layout.mean(t)[0]).all() for t in layout.tables)

        with tf.control_dependencies([mean for mean in means if mean is not None]):
            return tf.numpy_function(look, [], tf.bool)

    def _guarded(
        self, paths: Sequence[str], arrays: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], bool]:
        """Gradients as the guard lets them on, and whether it wants the step skipped."""
        if self.guard is None:
            return list(arrays), False
        try:
            return self.guard.look(paths, arrays)
        except BadNumbers as error:
            self.communicator.patience.trouble = error  # TensorFlow hides it in its own
            raise

    def describe(self) -> dict[str, JSON]:
        """What was chosen, for the record."""
        return {
            "algorithm": self.choice.algorithm,
            "why": self.choice.why,
            "schedule": self.schedule.name,
            "stands_still": self._after,
            "bucket_bytes": [bucket.nbytes for bucket in self.buckets],
            "compressor": None if self.compressor is None else self.compressor.to_json(),
            "rows": [self._layout.signature[table].name for table in self._layout.tables],
        }

    def _as_rows(self, gradient: tf.Tensor) -> bool:
        """Whether a gradient may travel as rows, by what is the same on all ranks."""
        import tensorflow as tf

        if not isinstance(gradient, tf.IndexedSlices) or self.compressor is not None:
            return False
        shape = tf.TensorShape(tf.get_static_value(gradient.dense_shape))
        return (
            bool(shape.is_fully_defined())
            and shape[0] <= np.iinfo(np.int32).max
            and rows_pay(
                self.communicator, self.algorithm, shape.num_elements() * gradient.dtype.size
            )
        )

    def remembered(self) -> dict[str, np.ndarray]:
        """What was chosen, and what the compressor knows."""
        states = {} if self.compressed is None else self.compressed.remembered()
        if not self._layout.parcels:
            return states
        return states | {
            f"choice/{name}": np.array(said) for name, said in vars(self.choice).items()
        }

    def recall(self, found: Mapping[str, np.ndarray]) -> None:
        """Choose as it was chosen then, and let the compressor know what it knew."""
        choice = {name: str(found[name]) for name in found if name.startswith("choice/")}
        if choice:
            self._recalled = Choice(choice["choice/algorithm"], choice["choice/why"])
        if self.compressed is not None:
            self.compressed.recall({name: found[name] for name in found if name not in choice})

    def reset(self, scale: float) -> None:
        """Begin anew on the ranks that live; what the compressor knows, and the choice, stay.

        Nothing is laid out, and training steps must be traced, anew.

        Args:
            scale: of the ranks that there were, how many there are: residuals are of a mean over
                more ranks, in which each counted less.
        """
        self._restarts = self.communicator.restarts
        if self._layout.parcels:
            self._recalled = self.choice
        if self.compressed is not None:
            self.compressed.renew(scale)
        self._lay_out(Layout(self.communicator, [], [], [], self.choice))
        self.communicator.pace(self.schedule.turns)
        self._attend(self.schedule.after)

    def issue(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """See `Operations`, as for `wait`: of the gradients that were prepared last.

        Raises:
            InvalidInput: of what is not copied, and travels while the step stands still.
        """
        if self._after:
            raise InvalidInput(
                "buckets of a step that stands still are not issued one by one: call `mean`, or "
                "give eager=True"
            )
        return self._operations.issue(gradients, rows)

    def wait(self, variables: Iterable[int]) -> list[tf.Tensor]:
        """The means of these variables, as soon as they are there."""
        return self._operations.wait(variables)

    def prepare(
        self, gradients: list[tf.Tensor], names: list[str], groups: Sequence[int] | None = None
    ) -> None:
        """Lay out the buckets; all ranks must have the same ones.

        Args:
            gradients: tensors, slices that travel as rows, or the variables that they are of.
            names: for messages.
            groups: of each gradient; those of one group are waited for together.
        """
        signature = signature_of(gradients, names)
        if self._layout.parcels and signature == self._layout.signature:
            return
        agree(self.communicator, signature, self._options())
        if not signature:
            raise InvalidInput(
                "no variable has a gradient: is the loss made of the model's output?"
            )
        compressor = self.compressor
        after = self._after = self.schedule.after or (
            not (self._eager or self.schedule.into_next) and no_core_is_free(self.communicator)
        )
        # What a compressor makes of a bucket must not depend on how many cores there are.
        limit = None if self.schedule.after or (after and not compressor) else self.bucket_bytes
        by_layer = compressor is not None and compressor.by_layer
        dtypes = dtypes_of(gradients)
        cut = limit is not None and not by_layer
        buckets = in_buckets(signature, dtypes, limit, cut=cut, groups=groups)
        largest = max((bucket.nbytes for bucket in buckets), default=LEAST)
        dense = compressor is None
        given = self._recalled
        choice = given or choose(self.communicator, self.algorithm, largest, dense)
        self._lay_out(Layout(self.communicator, signature, dtypes, buckets, choice, dense, after))

    def by_priority(self, ready: list[float], seconds: list[float]) -> list[int]:
        """The order that serves front layers first, the same on all ranks (collective)."""
        told = self.communicator.allgather((ready, seconds), what="the order of the buckets")
        means = np.mean(told, axis=0)
        urgency = [min(held) for held in self._layout.parcels]
        return by_priority(means[0].tolist(), means[1].tolist(), urgency)

    def _lay_out(self, layout: Layout) -> None:
        self._layout, numbers = layout, range(len(layout.parcels))
        self.service = Service(self._serve, numbers, self.timeline, self._attend)
        self._operations = Operations(
            layout, self.service, self._begin, self._pack, self._serve_standing
        )

    def _options(self) -> dict[str, str]:
        """What ranks must have said alike."""
        options = {
            "algorithm": self.algorithm,
            "schedule": self.schedule.name,
            "bucket_bytes": self.bucket_bytes,
            "compressor": self.compressor and self.compressor.to_json(),
        }
        return {name: repr(option) for name, option in options.items()}

    def _pack(self, number: int, arrays: Sequence[np.ndarray], count: np.ndarray) -> None:
        start = self.clock.now()
        layout, injector = self._layout, self.communicator.rules.injector
        paths = [layout.signature[variable].name for variable in layout.parcels[number]]
        given, rest = list(arrays[: len(paths)]), arrays[len(paths) :]
        if injector is not None:
            given = injector.gradients(paths, given)
        if count:  # without samples even one that is not a number counts 0
            given, skips = self._guarded(paths, given)
            if skips:  # a weight that is no number makes the mean none, on all ranks
                count = np.array(np.nan)
        layout.pack(number, [*given, *rest], count, self.timeline.step)
        self.timeline.add("pack", number, start)

    def _begin(self, traced: Layout, standing: bool) -> None:
        """Refuse a step that was traced before another one laid out the parcels anew."""
        if traced is not self._layout:
            raise InvalidInput(
                "two compiled training steps with different variables share one distributed "
                "optimizer; give each step an optimizer of its own"
            )
        if standing:  # another exchange of these ranks may have said otherwise
            self._attend(True)
            self.communicator.pace(self.schedule.turns)

    def _attend(self, standing: bool) -> None:
        """While the training step stands still, waits may take its core."""
        self.communicator.patience.polite = not standing

    def _serve(self, number: int) -> None:
        if number == 0 and self._paces:
            self.communicator.act_slow(self.clock.now() - self._left)
        self._reduce(self._layout, number, first=number == self.service.order[0])
        self._left = self.clock.now()

    def _serve_standing(self, number: int) -> None:
        start = self.clock.now()
        self._serve(number)
        self.timeline.add("communicate", number, start)
        self.timeline.add("wait", number, start)
