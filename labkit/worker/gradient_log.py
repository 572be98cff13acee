"""Logs of the gradients that backpropagation computes on a rank and that the rank applies."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.compression.compressor import ExpectedResidual
from labkit.exchange import BucketLayer, Exchange, ReductionRecord
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, Variables, hooks_of
from labkit.experiment.experiment import Experiment
from labkit.keras import view_of
from labkit.worker.feed import DataSource
from labkit.worker.session import TrainingSession

# The dict `TOLERANCE` maps the size of a float in bytes to the allowed rounding error. The allowed
# rounding error is relative to the sum of each step's largest absolute value over all steps.
TOLERANCE = {4: 1e-5, 8: 1e-12}


class Violation(NamedTuple):
    """A conservation law's violation, its allowed size due to rounding, and a description."""

    difference: float
    allowed: float
    what: str

    @property
    def excess(self) -> float:
        """The violation divided by the allowed rounding error; infinity if the violation is NaN."""
        finite = self.allowed and np.isfinite(self.difference)
        return self.difference / self.allowed if finite else np.inf


@dataclass
class _Sums:
    """Float64 sums of the values sent and received in one bucket over all training steps."""

    sent: np.ndarray
    mean: np.ndarray
    waiting: ExpectedResidual | None
    itemsize: int
    # The attribute `size` sums each step's largest absolute value over all steps.
    size: float = 0.0
    # The attribute `lost` is the largest violation of the residual's conservation law in any step.
    lost: float = 0.0


@dataclass
class Audit:
    r"""Verify each bucket of a compressed gradient exchange by two conservation laws.

    The conservation law of the residual holds on each rank after every step. The residual is the
    sum of gradients minus the sum of values sent. The class `ExpectedResidual` computes the
    expected residual. For DGC (deep gradient compression), the velocities
    obey a law of the same form. The conservation law of the mean gradients holds over all ranks
    together. Each rank adds up the values that it sends. On average over ranks, the sent values add
    up to the mean gradients. In symbols, the law is \(\frac1n \sum_r \sum_t s_{r,t} = \sum_t \hat
    g_t\).

    Each of the two conservation laws holds up to rounding errors. For mean gradients, the audit
    also allows rounding errors from the sum of compressed values.

    Args:
        communicator: Communicator of the ranks that exchange gradients.
        remembers: Whether the compressor stores a residual; if so, the conservation law of the
            residual applies.
        rounding: Relative rounding error of a sum of compressed values.
        law: Function that creates an `ExpectedResidual`, one for each bucket.
    """

    communicator: Communicator
    remembers: bool
    rounding: float = 0.0
    law: Callable[[], ExpectedResidual | None] = ExpectedResidual
    _books: dict[int, _Sums] = field(default_factory=dict)

    def observe(self, bucket: int, layers: Sequence[BucketLayer], record: ReductionRecord) -> None:
        """Add a bucket's values of one step to its sums; `Exchange` calls this for each bucket."""
        if bucket not in self._books:
            zero = np.zeros(len(record.given))
            law = self.law() if self.remembers else None
            self._books[bucket] = _Sums(zero, zero.copy(), law, record.given.dtype.itemsize)
        books = self._books[bucket]
        books.sent += record.sent
        books.mean += record.mean
        expected = np.zeros(0)
        if books.waiting is not None:
            expected = books.waiting.after(record.given, record.sent)
            residual = np.nan if record.residual is None else record.residual
            books.lost = float(np.max([books.lost, _largest(residual - expected)]))
        books.size += max(_largest(record.given), _largest(expected), _largest(record.sent))

    def difference(self) -> tuple[float, float]:
        """Return the worst violation of a law on any rank, and its tolerance (collective)."""
        worst = self.verdict()
        return worst.difference, worst.allowed

    def verdict(self, more: Sequence[Violation] = ()) -> Violation:
        """Return the worst violation over all ranks, all laws and `more` (collective)."""
        # If no bucket was observed, the audit fails, because the exchange must have bypassed the
        # compressor.
        nothing = Violation(np.inf, 0.0, "the exchange has bypassed the compressor")
        violations = [*(self._violations() if self._books else [nothing]), *more]
        gathered = self.communicator.allgather(
            [tuple(violation) for violation in violations], "the audit"
        )
        return max(
            (
                Violation(*violation)
                for local_violations in gathered
                for violation in local_violations
            ),
            key=lambda violation: violation.excess,
        )

    def _violations(self) -> Iterator[Violation]:
        for number, books in sorted(self._books.items()):
            exact = TOLERANCE[max(books.itemsize, 4)] * max(books.size, 1e-3)
            shared = (
                self.communicator.allreduce_small(books.sent, "the audit") / self.communicator.size
            )
            summed = exact + 2 * self.rounding * books.size
            what = f"the mean of bucket {number} is not the mean of the values that ranks sent"
            yield Violation(_largest(shared - books.mean), summed, what)
            if books.waiting is not None:
                what = f"in bucket {number} a residual is not the gradient minus the values sent"
                yield Violation(books.lost, exact, what)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))


class StepChecksum(NamedTuple):
    """The checksums of a variable's applied gradient and new value in one training step."""

    name: str
    gradient: int
    weight: int = 0


class GradientLog:
    """A log of the gradients that the optimizers of a rank apply.

    Args:
        marks: Whether to record checksums of all gradients and weights in every step.
        sums: Whether to record each variable's sum of gradients over all steps, in float64.

    Attributes:
        marks: Checksums of all variables in all steps, in the order in which they were recorded.
        sums: For each variable, the sum of its gradients over the steps, as a flat array.
    """

    def __init__(self, marks: bool, sums: bool) -> None:
        self._marking, self._summing = marks, sums
        self.marks: list[StepChecksum] = []
        self.sums: dict[str, np.ndarray] = {}

    def watch(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Return an optimizer that shares the given one's state and logs the applied gradients."""
        if not self._marking and not self._summing:
            return optimizer
        kind = type(optimizer)

        def apply(
            optimizer_self: keras.optimizers.Optimizer,
            grads: Sequence[tf.Tensor | None],
            trainable_variables: Variables = None,
        ) -> tf.Tensor:
            variables = trainable_variables or optimizer_self._trainable_variables
            pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            names, scale = [v.path for _, v in pairs], getattr(optimizer_self, "dynamic_scale", 1.0)
            tensors = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
            logged = call_numpy(
                lambda by, *values: self.record_gradients(names, float(by), values), scale, *tensors
            )
            with tf.control_dependencies(graph_dependencies(logged)):
                result = kind.apply(optimizer_self, grads, trainable_variables)
            if self._marking:
                call_numpy(
                    lambda *values: self.record_weights(values), *(v.value for _, v in pairs)
                )
            return result

        return view_of(optimizer, type(kind.__name__, (kind,), {"apply": apply}))

    def record_gradients(
        self, names: Sequence[str], scale: float, gradients: Sequence[np.ndarray]
    ) -> None:
        """Record the gradients of a step before the optimizer applies them."""
        for name, gradient in zip(names, gradients, strict=True):
            if self._marking:
                self.marks.append(StepChecksum(name, _checksum(gradient)))
            # If a scaled loss overflows, all ranks skip the step, so its gradients must not enter
            # the sums.
            if self._summing and (scale == 1.0 or np.isfinite(gradient).all()):
                flat = gradient.reshape(-1).astype(np.float64) / scale
                self.sums[name] = self.sums.get(name, 0.0) + flat

    def record_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Record the checksums of the weights after a step."""
        first = len(self.marks) - len(weights)
        for place, weight in enumerate(weights, first):
            self.marks[place] = self.marks[place]._replace(weight=_checksum(weight))


def disagreement(marks: Sequence[StepChecksum], replicas: Communicator) -> str:
    """Describe where the logs of replicas first differ; return "" if they agree (collective)."""
    logs: list[list[StepChecksum]] = replicas.allgather([*marks], "what replicas applied")
    if len({len(log) for log in logs}) > 1:
        counts = ", ".join(str(len(log)) for log in logs)
        return f"ranks have applied different numbers of gradients ({counts})"
    for marks_of_ranks in zip(*logs, strict=True):
        first = marks_of_ranks[0]
        for rank, other in enumerate(marks_of_ranks):
            if other[1] != first[1]:
                return f"the gradient of {first[0]} differs between ranks 0 and {rank}"
            if other[2] != first[2]:
                return f"{first[0]} differs between ranks 0 and {rank} after a step"
    return ""


class ExchangeInputLog(Hook):
    """A hook that logs gradients from backpropagation before ranks exchange them.

    The hook also observes the buckets of the exchange. labkit can then verify the inputs and
    outputs of the exchange.

    Args:
        communicator: Communicator of the ranks that exchange gradients.
        exchange: Gradient exchange whose buckets are observed.
    """

    name: ClassVar[str] = "dense"

    def __init__(self, communicator: Communicator, exchange: Exchange) -> None:
        self._communicator, self._exchange = communicator, exchange
        self._step_gradients: dict[int, tuple[np.ndarray, float]] = {}  # gradient, rows
        # The sum "brought" adds the gradients from backpropagation. The sum "handed" adds the
        # inputs that the gradient exchange reports. The sum "mean" adds the mean gradients that the
        # gradient exchange outputs.
        self._totals: dict[str, dict[str, np.ndarray]] = {"brought": {}, "handed": {}, "mean": {}}
        # For each variable, `_sizes` sums each step's largest absolute value over all steps.
        self._sizes: dict[str, float] = {}
        self._itemsize = 8

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Record each gradient of the step before the ranks exchange gradients."""
        places = [n for n, gradient in enumerate(gradients) if gradient is not None]
        logged = list(gradients)
        for number, place in enumerate(places):
            logged[place] = self._log_gradient(number, gradients[place], rows)
        return inner(logged, variables)

    def _log_gradient(self, number: int, gradient: tf.Tensor, rows: Rows) -> tf.Tensor:
        def note(value: np.ndarray, count: np.ndarray) -> None:
            self._step_gradients[number] = value.reshape(-1).astype(np.float64), float(count)

        count = tf.cast(1 if rows is None else rows, tf.int64)
        logged = call_numpy(note, tf.convert_to_tensor(gradient), count)
        with tf.control_dependencies(graph_dependencies(logged)):
            return tf.nest.map_structure(tf.identity, gradient, expand_composites=True)

    def observe(self, bucket: int, layers: Sequence[BucketLayer], record: ReductionRecord) -> None:
        """Add a bucket's values of one step to the sums; `Exchange` calls this for each bucket."""
        self._itemsize = record.given.dtype.itemsize
        slots = sorted(self._exchange.buckets[bucket].slots, key=lambda slot: slot.offset)
        _, rows = self._step_gradients.get(slots[0].variable, (None, 0.0))
        # The allreduce of row counts cannot deadlock, because all ranks process buckets in the same
        # order.
        total = float(
            self._communicator.allreduce_small(np.array([rows]), "the number of rows in a step")[0]
        )
        share = rows * self._communicator.size / total if total else 0.0
        for slot, layer in zip(slots, layers, strict=True):
            elements = slice(slot.start, slot.stop)
            elements_of_layer = slice(layer.start, layer.stop)
            length = self._exchange.length(slot.variable)
            books = {
                "handed": record.given[elements_of_layer],
                "mean": record.mean[elements_of_layer],
            }
            # Some exchange schedules record no gradients from backpropagation.
            if slot.variable in self._step_gradients:
                gradient = self._step_gradients[slot.variable][0][elements]
                books["brought"] = share * gradient if rows else np.zeros(len(gradient))
            for book, values in books.items():
                whole = self._totals[book].setdefault(layer.name, np.zeros(length))
                whole[elements] += values
            size = _most(record.given[elements_of_layer]) + _most(record.mean[elements_of_layer])
            self._sizes[layer.name] = self._sizes.get(layer.name, 0.0) + size

    def violations(self, applied: GradientLog) -> Iterator[Violation]:
        """Compare exchange inputs with gradients, and exchange outputs with applied gradients."""
        handed, brought, means = (self._totals[book] for book in ("handed", "brought", "mean"))
        if not means:
            yield Violation(np.inf, 0.0, "no gradients were compressed before the optimizer step")
        for name, mean in means.items():
            allowed = 4 * TOLERANCE[max(self._itemsize, 4)] * max(self._sizes[name], 1e-3)
            if name in brought:
                lost = _most(handed[name] - brought[name])
                yield Violation(lost, allowed, f"the exchanged gradient of {name} was altered")
            total = applied.sums.get(name)
            difference = np.inf if total is None or len(total) != len(mean) else _most(total - mean)
            yield Violation(
                difference, allowed, f"the applied gradient of {name} is not the mean over ranks"
            )


def call_numpy(function: Callable[..., None], *values: tf.Tensor | float) -> tf.Operation | None:
    """Call a function with values as NumPy arrays, either from a graph or in eager mode."""
    return tf.numpy_function(function, list(values), [], stateful=True)


def graph_dependencies(operation: tf.Operation | None) -> list[tf.Operation]:
    """Return the control dependencies: [operation] in a graph, [] in eager mode."""
    return [operation] if tf.inside_function() else []


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).data.cast("B"))


def _most(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0))


MOST = 2**28  # A gradient log has at most `MOST` bytes; later steps are omitted.


class LoggedUpdate(NamedTuple):
    """A variable's applied gradient and its new values in one step, as flat float64 arrays."""

    applied: np.ndarray
    weight: np.ndarray


class StepLog(GradientLog):
    """A log of all applied gradients, and of the weights after each training step.

    Attributes:
        steps: For each variable path, the updates of all steps in order.
    """

    def __init__(self) -> None:
        super().__init__(marks=True, sums=False)
        self.steps: dict[str, list[LoggedUpdate]] = {}
        self._pending: list[tuple[str, np.ndarray]] = []
        self._bytes_left = MOST

    @property
    def is_complete(self) -> bool:
        """Whether the log has all steps; otherwise the log has reached its size limit."""
        return self._bytes_left >= 0

    def record_gradients(
        self, names: Sequence[str], scale: float, gradients: Sequence[np.ndarray]
    ) -> None:
        """Record the gradients of a step, see `GradientLog`."""
        super().record_gradients(names, scale, gradients)
        self._pending = [(n, _flat(g) / scale) for n, g in zip(names, gradients, strict=True)]

    def record_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Record the weights after a step, see `GradientLog`."""
        super().record_weights(weights)
        for (name, gradient), weight in zip(self._pending, weights, strict=True):
            self._bytes_left -= 16 * gradient.size
            if self._bytes_left >= 0:
                self.steps.setdefault(name, []).append(LoggedUpdate(gradient, _flat(weight)))


class LocalGradients(NamedTuple):
    """One rank's gradients in a step (one flat array per variable) and its number of batch rows."""

    gradients: dict[str, np.ndarray]
    rows: float


class LocalGradientLog(Hook):
    """A hook that logs the gradients of each step as backpropagation has computed them.

    Args:
        model: Model whose gradients are logged.

    Attributes:
        steps: The gradients of each training step, in order.
        first: The weights before the first step, one flat array per variable.
        batches: The batch of each training step, in order.
    """

    name: ClassVar[str] = "dense"

    def __init__(self, model: keras.Model) -> None:
        self.steps: list[LocalGradients] = []
        self.first: dict[str, np.ndarray] = {}
        self.batches: list[Batch] = []
        self._variables, self._bytes_left = model.trainable_variables, MOST

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Record the batch of each step; in the first step, also record the initial weights."""
        names, tensors = [variable.path for variable in self._variables], tf.nest.flatten(data)

        def note(*values: np.ndarray) -> None:
            weights, parts = values[: len(names)], values[len(names) :]
            self.first = self.first or dict(zip(names, map(_flat, weights), strict=True))
            self._bytes_left -= sum(part.nbytes for part in parts)
            if self._bytes_left >= 0:
                self.batches.append(tf.nest.pack_sequence_as(data, [part + 0 for part in parts]))

        logged = call_numpy(note, *(variable.value for variable in self._variables), *tensors)
        with tf.control_dependencies(graph_dependencies(logged)):
            return inner(data)

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Record each gradient before ranks exchange their gradients."""
        present = [n for n, gradient in enumerate(gradients) if gradient is not None]
        names = [variables[n].path for n in present] if variables is not None else []

        def note(count: np.ndarray, *values: np.ndarray) -> None:
            self._bytes_left -= 8 * sum(value.size for value in values)
            if self._bytes_left >= 0:
                flat = dict(zip(names, map(_flat, values), strict=False))
                self.steps.append(LocalGradients(flat, float(count)))

        count = tf.cast(1 if rows is None else rows, tf.int64)
        logged = call_numpy(note, count, *(tf.convert_to_tensor(gradients[n]) for n in present))
        with tf.control_dependencies(graph_dependencies(logged)):
            logged_gradients = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
            return inner(logged_gradients, variables)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).astype(np.float64)


class LoggingSession(TrainingSession):
    """A training session that logs the gradients that its optimizers apply."""

    def __init__(
        self,
        short: Experiment,
        communicator: Communicator,
        source: DataSource,
        track: StepLog | None = None,
    ) -> None:
        super().__init__(short, communicator, source)
        self.feed.validation = None
        lossy = short.strategy.lossy
        # Gradients of ranks are compared only if several ranks hold the same weights.
        together = self.readers.size > 1 and not short.uses_programs
        self.applied = track or GradientLog(marks=together, sums=lossy is not None)
        self.exchange_inputs: ExchangeInputLog | None = None
        self.local_gradients = LocalGradientLog(self.model) if track is not None else None

    def optimizer(self) -> keras.optimizers.Optimizer:
        """Return a new optimizer that logs the gradients that it applies."""
        return self.applied.watch(super().optimizer())

    def compile(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Compile the model, and install hooks that log gradients before they are compressed."""
        super().compile(optimizer)
        if self.local_gradients is not None:
            hooks_of(self.model).add_hook(self.local_gradients)
        if self.experiment.strategy.lossy is not None:
            self.exchange_inputs = ExchangeInputLog(self.communicator, optimizer.exchange)
            hooks_of(self.model).add_hook(self.exchange_inputs)
            optimizer.exchange.watchers.append(self.exchange_inputs.observe)
