"""The exchange, which computes the mean of the ranks' gradients inside the training step."""

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
from labkit.exchange.autotune import (
    MIN_TABLE_BYTES,
    SCHEDULES,
    Choice,
    all_cores_compute,
    by_priority,
    choose,
    rows_are_worthwhile,
)
from labkit.exchange.bucket_layout import Bucket, BucketLayout, in_buckets
from labkit.exchange.comm_thread import CommThread, Operations, Timeline
from labkit.exchange.gradient import (
    BadNumbers,
    Guard,
    dtypes_of,
    signature_of,
    sum_repeated_rows,
    validate_agreement,
)
from labkit.exchange.reduction import BucketMean, CompressedReduction, Plain, Watcher

if TYPE_CHECKING:
    import tensorflow as tf

Rows: TypeAlias = "int | tf.Tensor | None"
BUCKET_BYTES = 4 * 2**20


class Exchange:
    r"""The exchange, which replaces each rank's gradients by their mean over all ranks.

    The mean weights each rank by its number of rows (samples): \(\bar g = \sum_r b_r g_r / \sum_r
    b_r\). The gradient \(g_r\) is the mean over the \(b_r\) samples of rank r. The weighted mean is
    the gradient of the global batch. Ranks may have different numbers of samples, or no samples. If
    the caller does not give the numbers of samples, all ranks have the same weight.

    Gradients are copied once, into buckets with fixed memory (shared memory on one host).
    TensorFlow reads the mean gradients from the buckets without a copy, until the next step
    overwrites the buckets. The gradient of a large table, such as an embedding, may be an
    `IndexedSlices` object. For a large table with an `IndexedSlices` gradient, ranks send only the
    changed rows. If ranks send only a table's changed rows, the mean gradient is an `IndexedSlices`
    object. Each row occurs only once in the table's mean gradient. Gradients of small tables are
    converted to dense tensors. An exchange with a compressor converts the gradients of all tables
    to dense tensors.

    Several classes implement the exchange. A `Schedule` decides when each bucket is exchanged. A
    `BucketLayout` manages the memory of the buckets, and a `BucketMean` computes their means. The
    communication thread is a `CommThread`.

    Args:
        communicator: The Communicator of the participating ranks.
        algorithm: The allreduce algorithm, see `Communicator.allreduce`; default: "auto", which
            measures the algorithms and uses the fastest.
        schedule: With "sequential", all buckets are exchanged after backpropagation. With
            "overlap", each bucket is exchanged during backpropagation, when its gradients are
            ready. If the ranks of one host compute on all cores, "overlap" exchanges buckets after
            backpropagation. "staggered" is like "sequential", but ranks take turns on shared links.
            For "priority", see `labkit.exchange.priority`.
        bucket_bytes: The size of a bucket in bytes, as a number or as a text such as "4MiB".
        compressor: A gradient compressor or its name; with None, gradients are not compressed.
        seed: The seed of the compressor's random numbers.
        paces: Whether the artificial slowdown of a rank applies between two exchanges. The
            artificial slowdown of a slow rank extends only time that counts as computation.
        guard: The check of gradients for non-finite values; with None, gradients are not checked.
            Loss scaling disables the guard, because scaled gradients are expected to overflow at
            times.
        eager: Whether "overlap" exchanges buckets during backpropagation even if all cores compute.

    Attributes:
        timeline: The recorded events of this rank with their times: steps, packing, exchanges and
            waits.
        compressed: The object that runs the compressor, or None without a compressor.
        watchers: Callbacks that receive the input and the result of each compressed bucket.
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
        # The attribute `_after` tells whether the training step blocks until all buckets are
        # reduced.
        self._after = self.schedule.after
        self.guard = guard
        self.clock = communicator.clock
        self.algorithm = algorithm
        self.bucket_bytes = parse_bytes(bucket_bytes, "bucket_bytes")
        self.compressor = None if compressor is None else parse(compressor)
        self._compressed: CompressedReduction | None = None
        self._recalled: Choice | None = None
        self._reduce: BucketMean = Plain(communicator)
        if self.compressor is not None:
            self._reduce = self._compressed = CompressedReduction(
                communicator, self.compressor, seed
            )
        self.compressed = self._compressed.mean if self._compressed else None
        self.watchers: list[Watcher] = self._compressed.watchers if self._compressed else []
        self.timeline = Timeline(self.clock)
        self._lay_out(
            BucketLayout(communicator, [], [], [], Choice(algorithm, "chosen by the experiment"))
        )
        self._restarts = communicator.restarts
        self._last_end = self.clock.now()
        self._set_blocked(self.schedule.after)
        communicator.pace(self.schedule.turns)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets of gradients; empty before the first step is traced."""
        return self._layout.buckets

    def length(self, variable: int) -> int:
        """Return the number of elements of a gradient, given its number in the layout."""
        return int(np.prod(self._layout.signature[variable][1]))

    def bucket_of(self, name: str) -> int:
        """Return the number of the first bucket or table with a variable's gradient, or -1."""
        names = [
            [self._layout.signature[n].name for n in variables]
            for variables in self._layout.parcels
        ]
        return next((number for number, members in enumerate(names) if name in members), -1)

    def names_in(self, bucket: int) -> list[str]:
        """Return the names of the variables whose gradients are in a bucket."""
        return [self._layout.signature[n].name for n in self._layout.parcels[bucket]]

    @property
    def choice(self) -> Choice:
        """The chosen allreduce algorithm, and the reason for the choice."""
        return self._layout.choice

    def mean(
        self,
        gradients: Sequence[tf.Tensor | None],
        rows: Rows = None,
        names: Sequence[str] = (),
        scale: tf.Tensor | None = None,
    ) -> list[tf.Tensor | None]:
        """Return the mean gradients in the order of `gradients`; TensorFlow traces this call.

        Args:
            gradients: List of this rank's gradients. Each is a tensor, an `IndexedSlices` object or
                None; the mean of None is None.
            rows: The number of samples of this rank's gradients, as a scalar tensor. With None, all
                ranks have equal weights.
            names: The names of the gradients' variables, for error messages.
            scale: The loss scale as a scalar tensor, or None without loss scaling. Compressors
                receive gradients without loss scaling, because they store residuals while the loss
                scale changes.

        Raises:
            Mismatch: Ranks have different gradients.
            NotFinite: A gradient is not finite before compression, although the loss is not scaled.
                `NotFinite` is also raised if finite gradients have a non-finite mean after
                compression.
        """
        import tensorflow as tf

        if scale is not None:
            self.guard = None
        if self.communicator.size == 1 and self.compressor is None and not self._may_change:
            whole = [sum_repeated_rows(gradient) for gradient in gradients]
            return whole if self.guard is None else self._check_local(whole, names)
        traced = tf.autograph.experimental.do_not_convert(self._mean)
        if scale is None or self._compressed is None:
            return list(traced(gradients, rows, names))
        if not self.schedule.after:
            raise InvalidInput(
                f"schedule={self.schedule.name!r} cannot combine a compressor with loss scaling: "
                "a rank may send one bucket before another bucket overflows, and the skipped "
                "step would lose the sent values; use schedule='sequential'"
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
        inputs = [
            gradients[i] if self._as_rows(gradients[i]) else tf.convert_to_tensor(gradients[i])
            for i in index
        ]
        self.prepare(inputs, [names[i] if i < len(names) else f"gradient {i}" for i in index])
        count = tf.constant(1, tf.int64) if rows is None else tf.cast(rows, tf.int64)
        traced = self._operations
        exchange = traced.all_at_once if self._after else traced.one_by_one
        means = dict(zip(index, exchange(inputs, count), strict=True))
        return [means.get(i) for i in range(len(gradients))]

    @property
    def is_outdated(self) -> bool:
        """Whether the communicator has restarted since the layout was made, so call `reset`."""
        return self._restarts != self.communicator.restarts

    @property
    def may_skip(self) -> bool:
        """Whether the check for non-finite gradients may skip training steps."""
        return self.guard is not None and self.guard.policy == "skip"

    @property
    def _may_change(self) -> bool:
        """Whether a guard or a fault injector may change gradients before the exchange."""
        stops = self.guard is None or self.guard.policy == "stop"
        return not stops or self.communicator.rules.injector is not None

    def _check_local(
        self, gradients: list[tf.Tensor | None], names: Sequence[str]
    ) -> list[tf.Tensor | None]:
        """Check the gradients of a single rank in a TensorFlow operation, and return them."""
        import tensorflow as tf

        named = [(n, g) for n, g in zip(names, gradients, strict=False) if g is not None]
        paths = [path for path, _ in named[::-1]]

        def check(*arrays: np.ndarray) -> bool:
            self._guarded(paths, arrays)
            return True

        tensors = [tf.convert_to_tensor(gradient) for _, gradient in named[::-1]]
        with tf.control_dependencies([tf.numpy_function(check, tensors, tf.bool)]):
            return [None if g is None else tf.identity(g) for g in gradients]

    def all_finite(self, means: Sequence[tf.Tensor | None] = ()) -> tf.Tensor:
        """Return whether the mean gradients are finite, so that the optimizer may apply them.

        Args:
            means: The mean gradients of this training step, which `mean` has returned.
        """
        import tensorflow as tf

        def check() -> bool:
            layout = self._layout
            slots = (slot for bucket in layout.buckets for slot in bucket.slots)
            # If a rank skips a training step, all elements of its bucket become NaN. A check of one
            # element per slot is therefore enough.
            dense = all(np.isfinite(layout.mean(s.variable)[0][s.start]) for s in slots)
            return dense and all(np.isfinite(layout.mean(t)[0]).all() for t in layout.tables)

        with tf.control_dependencies([mean for mean in means if mean is not None]):
            return tf.numpy_function(check, [], tf.bool)

    def _guarded(
        self, paths: Sequence[str], arrays: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], bool]:
        """Check gradients with the guard; return them, and whether to skip the training step."""
        if self.guard is None:
            return list(arrays), False
        try:
            return self.guard.check_gradients(paths, arrays)
        except BadNumbers as error:
            # The attribute `first_error` stores labkit's error, because TensorFlow hides the error
            # inside another error.
            self.communicator.wait_policy.first_error = error
            raise

    def describe(self) -> dict[str, JSON]:
        """Return the chosen algorithm and the layout of buckets, for the run's record."""
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
        """Return whether all ranks send only the changed rows of a gradient."""
        import tensorflow as tf

        if not isinstance(gradient, tf.IndexedSlices) or self.compressor is not None:
            return False
        shape = tf.TensorShape(tf.get_static_value(gradient.dense_shape))
        return (
            bool(shape.is_fully_defined())
            and shape[0] <= np.iinfo(np.int32).max
            and rows_are_worthwhile(
                self.communicator, self.algorithm, shape.num_elements() * gradient.dtype.size
            )
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the chosen algorithm and the compressor's states, for a checkpoint."""
        states = {} if self.compressed is None else self.compressed.state_dict()
        if not self._layout.parcels:
            return states
        return states | {
            f"choice/{name}": np.array(value) for name, value in vars(self.choice).items()
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the chosen algorithm and the compressor's states from `state_dict`."""
        choice = {name: str(state[name]) for name in state if name.startswith("choice/")}
        if choice:
            self._recalled = Choice(choice["choice/algorithm"], choice["choice/why"])
        if self.compressed is not None:
            self.compressed.load_state_dict(
                {name: state[name] for name in state if name not in choice}
            )

    def reset(self, scale: float) -> None:
        """Reset the exchange for the surviving ranks, but preserve algorithm choice and residuals.

        After the reset, TensorFlow must trace the training steps again, which creates a new layout.

        Args:
            scale: The new number of ranks divided by the old number. Residuals are multiplied by
                `scale`, because each rank has a larger weight in a mean over fewer ranks.
        """
        self._restarts = self.communicator.restarts
        if self._layout.parcels:
            self._recalled = self.choice
        if self.compressed is not None:
            self.compressed.reset(scale)
        self._lay_out(BucketLayout(self.communicator, [], [], [], self.choice))
        self.communicator.pace(self.schedule.turns)
        self._set_blocked(self.schedule.after)

    def issue(self, gradients: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Tensor]:
        """Pass all parcels (buckets, tables) to the communication thread, see `Operations.issue`.

        Raises:
            InvalidInput: This exchange processes its buckets only after backpropagation, while the
                step blocks.
        """
        if self._after:
            raise InvalidInput(
                "buckets cannot be exchanged one by one here, because this step exchanges them "
                "after backpropagation: call `mean`, or give eager=True"
            )
        return self._operations.issue(gradients, rows)

    def wait(self, variables: Iterable[int]) -> list[tf.Tensor]:
        """Wait for the buckets of some variables, and return the variables' mean gradients."""
        return self._operations.wait(variables)

    def prepare(
        self, gradients: list[tf.Tensor], names: list[str], groups: Sequence[int] | None = None
    ) -> None:
        """Assign gradients to buckets, in the same way on all ranks (collective).

        Args:
            gradients: Dense or sparse gradients, or the variables themselves.
            names: Names of the variables, for error messages.
            groups: The group number of each gradient; a bucket contains only gradients of one
                group.
                If `groups` is None, all gradients form one group.
        """
        signature = signature_of(gradients, names)
        if self._layout.parcels and signature == self._layout.signature:
            return
        validate_agreement(self.communicator, signature, self._options())
        if not signature:
            raise InvalidInput(
                "no variable has a gradient; use a loss that depends on the model's output"
            )
        compressor = self.compressor
        after = self._after = self.schedule.after or (
            not (self._eager or self.schedule.into_next) and all_cores_compute(self.communicator)
        )
        # With a compressor, the division into buckets changes the results of training. A
        # compressor's buckets must not depend on the number of cores. Otherwise, training results
        # would depend on the number of cores.
        limit = None if self.schedule.after or (after and not compressor) else self.bucket_bytes
        by_layer = compressor is not None and compressor.by_layer
        dtypes = dtypes_of(gradients)
        cut = limit is not None and not by_layer
        buckets = in_buckets(signature, dtypes, limit, cut=cut, groups=groups)
        largest = max((bucket.nbytes for bucket in buckets), default=MIN_TABLE_BYTES)
        dense = compressor is None
        recalled = self._recalled
        choice = recalled or choose(self.communicator, self.algorithm, largest, dense)
        self._lay_out(
            BucketLayout(self.communicator, signature, dtypes, buckets, choice, dense, after)
        )

    def by_priority(self, ready: list[float], seconds: list[float]) -> list[int]:
        """Return a bucket order with front layers first, the same on all ranks (collective).

        Args:
            ready: For each bucket, the seconds on this rank until the bucket is packed. The seconds
                in `ready` count from the packing of the first bucket.
            seconds: For each bucket, the seconds that its exchange takes on this rank.
        """
        times = self.communicator.allgather(
            (ready, seconds), label="the agreement on the order of the buckets"
        )
        means = np.mean(times, axis=0)
        urgency = [min(variables) for variables in self._layout.parcels]
        return by_priority(means[0].tolist(), means[1].tolist(), urgency)

    def _lay_out(self, layout: BucketLayout) -> None:
        self._layout, numbers = layout, range(len(layout.parcels))
        self.service = CommThread(self._serve, numbers, self.timeline, self._set_blocked)
        self._operations = Operations(
            layout, self.service, self._begin_step, self._pack, self._serve_standing
        )

    def _options(self) -> dict[str, str]:
        """Return the exchange options that must be equal on all ranks, as a dict of texts."""
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
        gradients, rest = list(arrays[: len(paths)]), arrays[len(paths) :]
        if injector is not None:
            gradients = injector.gradients(paths, gradients)
        if count:  # On a rank without samples, all gradients count as 0, even NaN.
            gradients, skips = self._guarded(paths, gradients)
            if skips:  # The weight NaN makes the mean gradients NaN on all ranks.
                count = np.array(np.nan)
        layout.pack(number, [*gradients, *rest], count, self.timeline.step)
        self.timeline.add("pack", number, start)

    def _begin_step(self, traced: BucketLayout, standing: bool) -> None:
        """Begin a step; raise InvalidInput if another step has replaced the bucket layout."""
        if traced is not self._layout:
            raise InvalidInput(
                "two compiled training steps with different variables share one distributed "
                "optimizer; give each step a separate optimizer"
            )
        # Another gradient exchange may have changed the communicator's wait policy and message
        # pacing since the last step.
        if standing:
            self._set_blocked(True)
            self.communicator.pace(self.schedule.turns)

    def _set_blocked(self, standing: bool) -> None:
        """Make waiting ranks spin if the training step blocks, and sleep if it computes."""
        self.communicator.wait_policy.polite = not standing

    def _serve(self, number: int) -> None:
        if number == 0 and self._paces:
            self.communicator.apply_slowdown(self.clock.now() - self._last_end)
        self._reduce(self._layout, number, first=number == self.service.order[0])
        self._last_end = self.clock.now()

    def _serve_standing(self, number: int) -> None:
        start = self.clock.now()
        self._serve(number)
        self.timeline.add("communicate", number, start)
        self.timeline.add("wait", number, start)
