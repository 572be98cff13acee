"""Callbacks and hooks that keep a model's replicas on all ranks consistent during `fit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, Variables, hooks_of, synchronized
from labkit.keras.evaluation import (
    IgnoreEmpty,
    begin_fit,
    end_fit,
    global_metrics,
    ignore_empty_batch,
    is_inside_fit,
)
from labkit.keras.optimizer import distributed_optimizers
from labkit.keras.replica_consistency import (
    Division,
    ReplicaConsistency,
    broadcast,
    draws_in_step,
    embedding_difference,
    why_not,
)
from labkit.keras.sharding import EqualBatches, check_fixed_batch
from labkit.keras.whole_batch import WholeBatch, print_on_first_rank
from labkit.keras.whole_metrics import WholeMetrics


def callbacks(communicator: Communicator, compare: bool = True) -> list[keras.callbacks.Callback]:
    """Return callbacks for `fit` that keep replicas equal and report metrics over all ranks.

    Place labkit's callbacks before your own callbacks. Your own callbacks may change the learning
    rate or the weights on one rank. Your own callbacks may also change the first epoch or the end
    of training. All ranks adopt a change that a callback makes on one rank.

    Args:
        communicator: Communicator of the ranks that train together.
        compare: Whether to compare the replicas' checksums at the start and after each epoch. The
            argument `compare` also turns on the comparison of the ranks' batches. If replicas
            differ in a way that ranks cannot adopt, training ends with an error.
    """
    synchronize = Synchronize(communicator, names=True, compare=compare)
    return [synchronize, EqualBatches(communicator)] if compare else [synchronize]


class Synchronize(keras.callbacks.Callback):
    """A callback that makes initial weights equal and reports metrics over all ranks.

    During training, each rank's gradients are weighted by the number of samples in its batch. An
    empty batch changes nothing. The metrics that `fit` reports cover the data of all ranks. For the
    metrics of Keras, the metric states are summed over the ranks. All other metrics receive the
    joined batches of all ranks, see `WholeMetrics`. Losses and synchronized normalizations are
    computed over the global batch, see `WholeBatch`. BatchNormalization layers without
    `synchronized` keep separate moving statistics on each rank. The callback averages the
    statistics over the ranks before validation and after each epoch.

    Args:
        communicator: Communicator of the ranks that train together.
        names: Whether to print at the start which layers make training differ from training in one
            process.
        compare: Whether to compare the replicas after all callbacks of each epoch.
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
        """Install the hooks on the model's methods before Keras builds the training function.

        Raises:
            InvalidInput: The optimizer of the model does not exchange gradients.
        """
        super().set_model(model)
        self.put_hooks(model)
        self._follow(model)

    def put_hooks(self, model: keras.Model) -> None:
        """Wrap the model's methods in the hooks that keep the replicas on all ranks consistent."""
        _prepare(model)
        hooks_of(model).add_hook(CountRows(model, self.communicator if self._names else None))
        hooks_of(model).add_hook(IgnoreEmpty(model))
        if self.communicator.size > 1:
            hooks_of(model).add_hook(WholeBatch(model, self.communicator, tests=True))
            hooks_of(model).add_hook(WholeMetrics(model))

    def _follow(self, model: keras.Model) -> None:
        if self._compares:
            self._consistency = ReplicaConsistency(model, self.communicator)
            if isinstance(getattr(model, "history", None), keras.callbacks.History):
                self._consistency.attach_to_history(
                    model.history
                )  # Without Keras's History callback, labkit compares replicas only after step 1.

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Copy the weights of rank 0 to all ranks as soon as all weights exist."""
        begin_fit(self.model, self.communicator)
        if _lacks_weights(self.model):
            # Labkit makes existing weights equal before the first batch creates the remaining
            # weights. With equal weights, the replicas can already be compared.
            broadcast(self.model.variables, self.communicator)
            self._record_state()
            self.model.train_function = _FirstBatch(self)
        else:
            self.begin()

    def begin(self) -> None:
        """Copy rank 0's weights to all ranks; warn of differences to one process (collective)."""
        states = [
            v for optimizer in distributed_optimizers(self.model) for v in optimizer.variables
        ]
        broadcast(self.model.variables + states, self.communicator)
        hooks_of(self.model).add_hook(GlobalMetrics(self.model, self.communicator))
        if self._names:
            _print_differences(self.model, self.communicator)
        self._record_state()
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compare the replicas once in each `fit`, after the first step and its callbacks."""
        self._batches += 1
        if self._batches == 2 and self._consistency is not None:
            self._consistency.compare_now("after the first step")

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Record the state of the replica before other callbacks change it."""
        self._record_state()

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        """Average moving statistics over the ranks, so that all ranks validate the same model."""
        average_statistics(self.model, self.communicator)
        self._record_state()

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        """Record the state of the replica before other callbacks change it."""
        self._record_state()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Average the moving statistics and the epoch's logs over the ranks.

        Without the average over ranks, the logs of a custom `train_step` may differ between ranks.
        Later callbacks receive the mean values, and therefore make the same decisions on all ranks.
        """
        average_statistics(self.model, self.communicator)
        self._record_state()
        if not logs:
            return
        names = sorted(
            (name for name, value in logs.items() if np.ndim(value) == 0), key=_metric_sort_key
        )
        values = np.array([float(logs[name]) for name in names])
        total = self.communicator.allreduce_small(values, "the epoch's metrics")
        logs.update(zip(names, (total / self.communicator.size).tolist(), strict=True))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Remove the hooks, so that a single rank can evaluate the model afterwards."""
        # A nested `fit` keeps the hooks, because the outer `fit` still needs the hooks.
        if is_inside_fit(self.communicator, exclude_current=True):
            self._record_state()
            return
        end_fit(self.model, self.communicator)
        hooks_of(self.model).remove_hooks("rows", "tests", "metrics", "whole", "updates")
        self._record_state()

    def _record_state(self) -> None:
        if self._consistency is not None:
            self._consistency.record_state()


def _print_differences(
    model: keras.Model, communicator: Communicator, step: tf.Graph | None = None
) -> None:
    """Print why training may differ from training in one process.

    Args:
        model: Compiled model to be trained.
        communicator: Communicator of the ranks; only rank 0 prints.
        step: Graph of a traced step. The function searches the graph for random operations. Without
            a graph, the function checks only the layers.
    """
    if communicator.size == 1:
        return
    reason = why_not(model, Division(communicator.size, microbatches=False, synchronizes=True))
    reasons = [reason]
    if step is not None:
        reasons = [draws_in_step(step) if reason is None else None]
    elif getattr(model, "optimizer", None) is not None:
        reasons.append(embedding_difference(model))
    for text in filter(None, reasons):
        print_on_first_rank(communicator, f"training may differ from that of one process: {text}")


class _FirstBatch:
    """A stand-in for Keras's training function that builds the model before the first step."""

    def __init__(self, synchronize: Synchronize) -> None:
        self._synchronize = synchronize

    def __call__(self, batches: tf.data.Iterator) -> Logs:
        model = self._synchronize.model
        model.train_function = None
        # Tracing the step creates all weights without training, even if the model has no `call`.
        step = tf.function(model.train_step, autograph=False)
        step.get_concrete_function(batches.element_spec)
        # Tracing the training step may create layers, and new layers need hooks too.
        self._synchronize.put_hooks(model)
        self._synchronize.begin()
        model.make_train_function()
        logs: Logs = model.train_function(batches)
        return logs


def _lacks_weights(model: keras.Model) -> bool:
    """Return whether some layers create their weights only when they receive the first batch."""
    makes_own = type(model).build is not keras.Model.build
    layers = model._flatten_layers(include_self=makes_own)
    return not model.variables or not all(layer.built for layer in layers)


def _metric_sort_key(name: str) -> tuple[str, int]:
    """Return a sort key with which metric names have the same order on all ranks.

    Keras appends numbers to the names of metrics. A rank that has created more metrics before uses
    higher numbers. The metric `auc_9` on one rank may be `auc_10` on another rank.
    """
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdecimal() else (name, 0)


def attach(model: keras.Model) -> None:
    """Make `train_on_batch` weight each rank's gradients by its number of samples; disable XLA.

    `attach` changes the optimizer passed to `compile`, and optimizers in attributes of the model,
    for a custom `train_step`.

    Raises:
        InvalidInput: No optimizer of the model exchanges gradients.
    """
    _prepare(model)
    hooks_of(model).add_hook(CountRows(model), stays=True)
    hooks_of(model).add_hook(IgnoreEmpty(model), stays=True)
    communicator = distributed_optimizers(model)[0].exchange.communicator
    if communicator.size > 1:
        hooks_of(model).add_hook(WholeBatch(model, communicator), stays=True)


def _prepare(model: keras.Model) -> None:
    distributed = distributed_optimizers(model)
    if not distributed:
        raise InvalidInput(
            "the model's optimizer exchanges no gradients; compile with "
            "optimizer=DistributedOptimizer(optimizer, communicator), made after "
            "keras.config.set_dtype_policy"
        )
    layers = synchronized(model)
    for schedule in [optimizer.exchange.schedule for optimizer in distributed]:
        if layers and not schedule.after:
            raise InvalidInput(
                f"schedule={schedule.name!r} sends gradients during backpropagation, and layer "
                f"{layers[0].name!r} (BatchNormalization with synchronized=True) communicates at "
                "the same time; use schedule='sequential', or synchronized=False"
            )
    if model.jit_compile:
        print_on_first_rank(
            distributed[0].exchange.communicator,
            "jit_compile is turned off, because XLA cannot call MPI",
        )
        model.jit_compile = False
        model.train_function = None


@dataclass(frozen=True)
class CountRows(Hook):
    """A hook that weights a rank's gradients by its number of samples, and ignores empty batches.

    Args:
        model: Model with distributed optimizers.
        naming: Communicator that prints warnings about random numbers, or None.
    """

    name: ClassVar[str] = "rows"

    model: keras.Model
    naming: Communicator | None = None
    traces: list[bool] = field(default_factory=list, compare=False)

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Run a training step; a sample of zeros with weight 0 replaces an empty batch."""
        if distributed_optimizers(self.model)[0].exchange.communicator.size > 1:
            check_fixed_batch(self.model, rows)
        # Weight initializers also draw random numbers, but all ranks use only the weights of rank
        # 0.
        makes_weights = _lacks_weights(self.model)
        if tf.get_static_value(rows):
            logs = inner(data)
        else:
            logs = ignore_empty_batch(self.model, inner, data, rows)
        is_first = tf.inside_function() and not (makes_weights or self.traces)
        if self.naming is not None and is_first:
            # TensorFlow may trace a step more than once, so a non-empty list `traces` prevents a
            # second warning.
            self.traces.append(True)
            _print_differences(self.model, self.naming, tf.compat.v1.get_default_graph())
        return logs

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Pass the number of samples to the gradient exchange, which averages the gradients."""
        return inner(gradients, variables, rows=rows)


@dataclass(frozen=True)
class GlobalMetrics(Hook):
    """A hook that makes `fit` report metrics over the data of all ranks."""

    name: ClassVar[str] = "metrics"

    model: keras.Model
    communicator: Communicator

    def get_metrics_result(self, inner: Callable[[], Logs], rows: Rows) -> Logs:
        """Return metrics over all ranks; during tracing, return the metrics of this rank."""
        if tf.inside_function():
            return inner()
        for optimizer in distributed_optimizers(self.model):
            # Only one thread at a time may call MPI. The method `settle` therefore waits until the
            # gradient exchange thread is idle.
            optimizer.exchange.service.settle()
        stops = ", because a callback has set stop_training" if self.model.stop_training else ""
        self.communicator.wait_policy.name_call("the end of an epoch's steps", detail=stops)
        self.communicator.wait_policy.allgather_scalar()
        return global_metrics(self.model, self.communicator, inner)

    def evaluate(
        self, inner: Callable[..., Logs], rows: Rows, *arguments: Any, **keywords: Any
    ) -> Logs:
        """Evaluate over all ranks in the validation of `fit`, but over one rank in a callback.

        After an evaluation in a callback, the metric states of the training epoch are restored.
        """
        if isinstance(keywords.get("callbacks"), keras.callbacks.CallbackList):
            return inner(*arguments, **keywords)
        states = [(variable, variable.numpy()) for variable in self.model.metrics_variables]
        with hooks_of(self.model).without("metrics", "whole", "updates"):
            logs = inner(*arguments, **keywords)
        for variable, value in states:
            variable.assign(value)
        return logs

    def fit(
        self,
        inner: Callable[..., keras.callbacks.History],
        rows: Rows,
        *arguments: Any,
        **keywords: Any,
    ) -> keras.callbacks.History:
        """Wait for all ranks before a nested `fit` in a callback, which exchanges gradients too."""
        if is_inside_fit(self.communicator):
            self.communicator.barrier("model.fit inside a callback, which every rank must call")
        else:  # A hook that exists outside a `fit` remains from a `fit` that failed.
            hooks_of(self.model).clear()
        return inner(*arguments, **keywords)


def average_statistics(model: keras.Model, communicator: Communicator) -> None:
    """Average moving statistics over the ranks, except those of synchronized BatchNormalization."""
    layers = model._flatten_layers(include_self=False)
    normalizations = [
        layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)
    ]
    statistics = [
        v
        for layer in normalizations
        if not layer.synchronized
        for v in layer.non_trainable_variables
    ]
    if not statistics or communicator.size == 1:
        return
    flat = np.concatenate([np.ravel(variable.numpy()).astype(float) for variable in statistics])
    means = communicator.allreduce_small(flat, "the moving statistics") / communicator.size
    ends = np.cumsum([int(np.prod(variable.shape)) for variable in statistics])[:-1]
    for variable, mean in zip(statistics, np.split(means, ends), strict=True):
        variable.assign(mean.reshape(variable.shape))
