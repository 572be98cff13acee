"""Replicas in step: what a model's `fit` needs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, Variables, seam, synchronized
from labkit.keras.equal_batches import EqualBatches
from labkit.keras.equivalence_exceptions import (
    Division,
    draws_in_step,
    why_not,
    why_words_differ,
)
from labkit.keras.evaluation import IgnoreEmpty, global_metrics, leave_no_trace_if_empty
from labkit.keras.failed_fits import begin_fit, end_fit, is_inside_fit
from labkit.keras.optimizer import distributed_optimizers
from labkit.keras.replica_consistency import ReplicaConsistency, broadcast
from labkit.keras.sharding import check_fixed_batch
from labkit.keras.whole_batch import WholeBatch, say_on_first
from labkit.keras.whole_metrics import WholeMetrics


def callbacks(communicator: Communicator, compare: bool = True) -> list[keras.callbacks.Callback]:
    """What `fit` needs on every rank: equal initial weights, right weighting, metrics of all.

    They stand before the user's callbacks. What those change on one rank alone between two steps
    (rate, weights, the first epoch, the end of training) is for all ranks, as in one process.

    Args:
        communicator: the ranks.
        compare: look for such changes at the start and after each epoch, by a checksum, and for
            ranks that read other batches; where replicas differ otherwise, training ends with an
            error.
    """
    synchronize = Synchronize(communicator, names=True, compare=compare)
    return [synchronize, EqualBatches(communicator)] if compare else [synchronize]


class Synchronize(keras.callbacks.Callback):
    """Keeps replicas in step: rank 0's weights at the start, metrics over all ranks at the end.

    While it is attached, the gradients of each rank count by the rows of its batch, a batch
    without rows leaves no trace, and the metrics that `fit` reports are those of the global data:
    the states of Keras's own are summed over the ranks before their result is taken, and others see
    whole batches, see `WholeMetrics`. Losses and
    synchronized normalizations are of the global batch, see `WholeBatch`; the moving statistics of
    other normalizations are averaged over the ranks before each validation and after each epoch.

    Args:
        communicator: the ranks.
        names: say at the start what will differ from one process by nature.
        compare: hold replicas against each other behind all callbacks of an epoch.
    """

    def __init__(
        self, communicator: Communicator, names: bool = False, compare: bool = False
    ) -> None:
        super().__init__()
        self.communicator, self._names = communicator, names
        self._compares = compare and communicator.size > 1
        self._consistency: ReplicaConsistency | None = None
        self._batches = 0

    def set_model(self, model: keras.Model) -> None:
        """Prepare the model before its training function is made.

        Raises:
            InvalidInput: gradients would not be exchanged.
        """
        super().set_model(model)
        self.put_hooks(model)
        self._follow(model)

    def put_hooks(self, model: keras.Model) -> None:
        """Put around the model's methods what keeps replicas in step."""
        _prepare(model)
        seam(model).put_on(CountRows(model, self.communicator if self._names else None))
        seam(model).put_on(IgnoreEmpty(model))
        if self.communicator.size > 1:
            seam(model).put_on(WholeBatch(model, self.communicator, tests=True))
            seam(model).put_on(WholeMetrics(model))

    def _follow(self, model: keras.Model) -> None:
        if self._compares:
            self._consistency = ReplicaConsistency(model, self.communicator)
            if isinstance(getattr(model, "history", None), keras.callbacks.History):
                self._consistency.follow(model.history)  # else only what follows the first step

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Give every rank the weights of rank 0, as soon as there are any."""
        begin_fit(self.model, self.communicator)
        if _lacks_weights(self.model):
            # Replicas are compared before the first batch makes the other weights.
            broadcast(self.model.variables, self.communicator)
            self._note()
            self.model.train_function = _FirstBatch(self)
        else:
            self.begin()

    def begin(self) -> None:
        """Give every rank the weights of rank 0, and say what will differ (collective)."""
        states = [v for each in distributed_optimizers(self.model) for v in each.variables]
        broadcast(self.model.variables + states, self.communicator)
        seam(self.model).put_on(GlobalMetrics(self.model, self.communicator))
        if self._names:
            _name(self.model, self.communicator)
        self._note()
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compare once after the first step, which a callback may end in its own way."""
        self._batches += 1
        if self._batches == 2 and self._consistency is not None:
            self._consistency.compare_now("after the first step")

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Know what replicas are before other callbacks."""
        self._note()

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        """Validate with the same statistics on all ranks."""
        average_statistics(self.model, self.communicator)
        self._note()

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        """Know what replicas are before other callbacks."""
        self._note()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Average over the ranks what a `train_step` of the user's own reports.

        Callbacks after this one then decide alike on all ranks.
        """
        average_statistics(self.model, self.communicator)
        self._note()
        if not logs:
            return
        names = sorted((name for name, value in logs.items() if np.ndim(value) == 0), key=_place)
        values = np.array([float(logs[name]) for name in names])
        total = self.communicator.tally(values, "the epoch's metrics")
        logs.update(zip(names, (total / self.communicator.size).tolist(), strict=True))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Leave the model as it was, so that one rank alone may evaluate."""
        if is_inside_fit(self.communicator, own=True):  # the outer fit goes on with these hooks
            self._note()
            return
        end_fit(self.model, self.communicator)
        seam(self.model).take_off("rows", "tests", "metrics", "whole", "updates")
        self._note()

    def _note(self) -> None:
        if self._consistency is not None:
            self._consistency.note()


def _name(model: keras.Model, communicator: Communicator, step: tf.Graph | None = None) -> None:
    """Say what may differ from one process: at the start, or of a step what was not said then."""
    if communicator.size == 1:
        return
    reason = why_not(model, Division(communicator.size, microbatches=False, synchronizes=True))
    reasons = [reason]
    if step is not None:
        reasons = [draws_in_step(step) if reason is None else None]
    elif getattr(model, "optimizer", None) is not None:
        reasons.append(why_words_differ(model))
    for text in filter(None, reasons):
        say_on_first(communicator, f"training may differ from that of one process: {text}")


class _FirstBatch:
    """A training function by whose first batch a model is built; it then makes way for Keras's."""

    def __init__(self, synchronize: Synchronize) -> None:
        self._synchronize = synchronize

    def __call__(self, batches: tf.data.Iterator) -> Logs:
        model = self._synchronize.model
        model.train_function = None
        # A trace makes all weights and does not run: also where models have no `call`.
        step = tf.function(model.train_step, autograph=False)
        step.get_concrete_function(batches.element_spec)
        self._synchronize.put_hooks(model)  # layers that have been made have hooks, too
        self._synchronize.begin()
        model.make_train_function()
        logs: Logs = model.train_function(batches)
        return logs


def _lacks_weights(model: keras.Model) -> bool:
    """Whether layers make weights when they see a batch; the model need not be `built` itself."""
    makes_own = type(model).build is not keras.Model.build
    layers = model._flatten_layers(include_self=makes_own)
    return not model.variables or not all(layer.built for layer in layers)


def _place(name: str) -> tuple[str, int]:
    """By what a metric's name sorts alike on ranks that have made more metrics before.

    Keras counts names: `auc_9` and `auc_10` may be `auc_10` and `auc_11` elsewhere.
    """
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdecimal() else (name, 0)


def attach(model: keras.Model) -> None:
    """Let the model's optimizers know how many rows are behind each rank's gradients; XLA off.

    Those are the one that it is compiled with, and what a `train_step` of its own keeps in
    attributes of the model.

    Raises:
        InvalidInput: there is none: gradients would not be exchanged.
    """
    _prepare(model)
    seam(model).put_on(CountRows(model), stays=True)
    seam(model).put_on(IgnoreEmpty(model), stays=True)
    communicator = distributed_optimizers(model)[0].exchange.communicator
    if communicator.size > 1:
        seam(model).put_on(WholeBatch(model, communicator), stays=True)


def _prepare(model: keras.Model) -> None:
    own = distributed_optimizers(model)
    if not own:
        raise InvalidInput(
            "the model's optimizer exchanges no gradients: compile with "
            "optimizer=DistributedOptimizer(optimizer, communicator), made after "
            "keras.config.set_dtype_policy"
        )
    layers = synchronized(model)
    for schedule in [each.exchange.schedule for each in own]:
        if layers and not schedule.after:
            raise InvalidInput(
                f"schedule={schedule.name!r} sends gradients while backpropagation goes on, and "
                f"layer {layers[0].name!r} (BatchNormalization with synchronized=True) meets the "
                "other ranks in it; use schedule='sequential', or synchronized=False"
            )
    if model.jit_compile:
        say_on_first(own[0].exchange.communicator, "jit_compile is off: XLA cannot call MPI")
        model.jit_compile = False
        model.train_function = None


@dataclass(frozen=True)
class CountRows(Hook):
    """The gradients of a rank count by its rows, and a batch without rows leaves no trace.

    Args:
        model: with distributed optimizers.
        naming: ranks of which the first says that a step draws random numbers; None: none does.
    """

    name: ClassVar[str] = "rows"

    model: keras.Model
    naming: Communicator | None = None
    traces: list[bool] = field(default_factory=list, compare=False)

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Layers never see an empty batch."""
        if distributed_optimizers(self.model)[0].exchange.communicator.size > 1:
            check_fixed_batch(self.model, rows)
        makes_weights = _lacks_weights(self.model)  # at random, which rank 0 does for all
        if tf.get_static_value(rows):
            logs = inner(data)
        else:
            logs = leave_no_trace_if_empty(self.model, inner, data, rows)
        is_first = tf.inside_function() and not (makes_weights or self.traces)
        if self.naming is not None and is_first:
            self.traces.append(True)  # steps are traced more than once
            _name(self.model, self.naming, tf.compat.v1.get_default_graph())
        return logs

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Hand the rows to whatever takes the mean of the gradients."""
        return inner(gradients, variables, rows=rows)


@dataclass(frozen=True)
class GlobalMetrics(Hook):
    """The metrics that `fit` reports are those of all ranks' data."""

    name: ClassVar[str] = "metrics"

    model: keras.Model
    communicator: Communicator

    def get_metrics_result(self, inner: Callable[[], Logs], rows: Rows) -> Logs:
        """Of the states of all ranks; within the graph of a step, of this rank."""
        if tf.inside_function():
            return inner()
        for optimizer in distributed_optimizers(self.model):
            optimizer.exchange.service.settle()  # one thread at a time
        stops = ", as a callback has set stop_training" if self.model.stop_training else ""
        self.communicator.patience.enter("the end of an epoch's steps", told=stops)
        self.communicator.patience.gather_here()
        return global_metrics(self.model, self.communicator, inner)

    def evaluate(self, inner: Callable[..., Logs], rows: Rows, *given: Any, **named: Any) -> Logs:
        """`fit` validates by all ranks; what a callback evaluates is of its rank alone.

        The metrics of the epoch go on afterwards.
        """
        if isinstance(named.get("callbacks"), keras.callbacks.CallbackList):
            return inner(*given, **named)
        kept = [(variable, variable.numpy()) for variable in self.model.metrics_variables]
        with seam(self.model).without("metrics", "whole", "updates"):
            found = inner(*given, **named)
        for variable, value in kept:
            variable.assign(value)
        return found

    def fit(
        self, inner: Callable[..., keras.callbacks.History], rows: Rows, *given: Any, **named: Any
    ) -> keras.callbacks.History:
        """Gradients meet in it, too: one rank alone would wait for the others."""
        if is_inside_fit(self.communicator):
            self.communicator.meet("model.fit inside a callback, which every rank must call")
        else:  # the fit that this hook belongs to has failed
            seam(self.model).clear()
        return inner(*given, **named)


def average_statistics(model: keras.Model, communicator: Communicator) -> None:
    """Give every rank the mean of the ranks' moving statistics, where each has its own."""
    layers = model._flatten_layers(include_self=False)
    own = [each for each in layers if isinstance(each, keras.layers.BatchNormalization)]
    kept = [v for each in own if not each.synchronized for v in each.non_trainable_variables]
    if not kept or communicator.size == 1:
        return
    flat = np.concatenate([np.ravel(variable.numpy()).astype(float) for variable in kept])
    means = communicator.tally(flat, "the moving statistics") / communicator.size
    ends = np.cumsum([int(np.prod(variable.shape)) for variable in kept])[:-1]
    for variable, mean in zip(kept, np.split(means, ends), strict=True):
        variable.assign(mean.reshape(variable.shape))
