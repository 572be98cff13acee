"""Metrics whose states cannot be summed over ranks, so each rank updates them with all batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, hooks_of
from labkit.keras.whole_batch import ReplicaSums, WholeBatch
from labkit.model_parallel.functional import attach_mask, is_masked, mask_of

# The type `Seen` records a metric update. A record contains the metric's number, its arguments, and
# the masks by tensor number.
Seen: TypeAlias = "tuple[int, tuple[tuple[Any, ...], dict[str, Any]], dict[int, np.ndarray]]"


def adds_up(model: keras.Model, metric: keras.metrics.Metric) -> bool:
    """Return whether a metric's states over parts of the data sum to its state over all data.

    If Keras's own metrics come from `compile`, their states can be summed. The states of mean
    losses from `compile` can also be summed. A metric function may return one number per batch. A
    custom metric class or `train_step` may compute anything. The states of metric functions and of
    custom metrics cannot be summed.
    """
    kind = type(metric)
    if kind is keras.metrics.Sum:
        return True
    compiled = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss")]
    known = [model._loss_tracker, *(m for group in compiled if group for m in group.metrics)]
    is_function = kind is keras.metrics.MeanMetricWrapper
    is_keras_metric = kind.__module__.partition(".")[0] == "keras" and not is_function
    return is_keras_metric and any(metric is group for group in known)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return all metrics of a model, including the metrics of `compile`."""
    groups = [m.metrics if isinstance(m, CompileMetrics) else [m] for m in model.metrics]
    return [metric for group in groups for metric in group]


@dataclass(frozen=True)
class _Updates(Hook):
    """A hook that intercepts updates of metrics whose states cannot be summed over ranks."""

    name: ClassVar[str] = "updates"

    model: keras.Model

    def update_state(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *arguments: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """Update a metric through `update_metric` if its states cannot be summed over ranks."""
        if not isinstance(metric, CompileMetrics):
            update = (
                inner
                if adds_up(self.model, metric)
                else partial(self.update_metric, inner, rows, metric)
            )
            update(*arguments, **named)
            return
        if not metric.built:
            metric.build(*arguments[:2])
        others = [
            member
            for member in metric.metrics
            if not adds_up(self.model, member) and "update_state" not in vars(member)
        ]  # metrics that are also attributes of the model are already wrapped
        for member in others:
            member.update_state = partial(self.update_metric, member.update_state, rows, member)
        try:
            inner(*arguments, **named)
        finally:
            for member in others:
                del member.update_state

    def update_metric(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *arguments: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """Update a metric with a batch's arguments; called while TensorFlow traces the step."""
        raise NotImplementedError


@dataclass(frozen=True)
class WholeMetrics(_Updates):
    """Update metrics with the batches of all ranks in rank order, so that all states are equal.

    A scalar argument may be the loss of a custom `train_step`. Labkit treats a scalar as the mean
    over this rank's samples. Scalars are averaged over the ranks.

    Args:
        model: Keras model that also has a `WholeBatch` hook, which computes sums over the ranks.
    """

    @property
    def sums(self) -> ReplicaSums:
        """The collective sums over ranks in the step that is being traced."""
        whole = next(hook for hook in hooks_of(self.model).hooks if isinstance(hook, WholeBatch))
        return whole.sums

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Run a training step; average logged scalars over the ranks, except metric results."""
        return self._logs(inner(data), rows)

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Run a test step; average logged scalars over the ranks, except metric results."""
        return self._logs(inner(data), rows)

    def _logs(self, logs: Logs, rows: Rows) -> Logs:
        sums = self.sums
        # A custom training or test step may return a metric's variable instead of the metric's
        # value.
        logs = {
            name: value.value if isinstance(value, keras.Variable) else value
            for name, value in logs.items()
        }
        numbers = {name: value for name, value in logs.items() if _is_number(value)}
        # The logs may contain exactly the names of the metrics. Keras then recomputes the logged
        # values from the metric states.
        if not (sums.within and numbers) or logs.keys() == self.model.get_metrics_result().keys():
            return logs
        means = sums.mean(list(numbers.values()), rows, "logs")
        return logs | dict(zip(numbers, means, strict=True))

    def update_metric(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *arguments: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """Update a metric with all ranks' samples; average scalar arguments over the ranks."""
        sums = self.sums
        if not sums.within or rows is None:
            inner(*arguments, **named)
            return
        leaves = keras.tree.flatten((arguments, named))
        _refuse_sparse(metric, leaves)
        batches = [leaf for leaf in leaves if _is_batch(leaf, rows)]
        masks = [mask_of(leaf) for leaf in batches]
        numbers = [leaf for leaf in leaves if _is_number(leaf)]
        values = [*batches, *(mask for mask in masks if mask is not None)]
        joined = iter(sums.gather(values, rows, "values of a metric") if values else [])
        means = sums.mean(numbers, rows, "numbers of a metric") if numbers else []
        new = {id(leaf): next(joined) for leaf in batches}
        new |= {id(leaf): mean for leaf, mean in zip(numbers, means, strict=True)}
        for leaf, mask in zip(batches, masks, strict=True):
            attach_mask(new[id(leaf)], None if mask is None else next(joined))
        arguments, named = keras.tree.map_structure(lambda v: new.get(id(v), v), (arguments, named))
        inner(*arguments, **named)
        hooks_of(self.model).alike |= {id(variable) for variable in metric.variables}


@dataclass(frozen=True, eq=False)
class SeenByMetrics(_Updates):
    """Record the arguments of metric updates on this rank, to repeat these updates on all ranks.

    Each model has only one recorder (`SeenByMetrics`), because the model's compiled test function
    refers to this recorder.
    """

    log: list[Seen] = field(default_factory=list)

    @classmethod
    def of(cls, model: keras.Model) -> SeenByMetrics:
        """Return the recorder (`SeenByMetrics`) of a model, and create it at the first call."""
        recorder: SeenByMetrics | None = vars(model).get("_labkit_seen")
        if recorder is None:
            recorder = model._labkit_seen = cls(model)
        return recorder

    def update_metric(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *arguments: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """Record the arguments; also update the metric, because the first update may build it."""
        inner(*arguments, **named)
        leaves = keras.tree.flatten((arguments, named))
        _refuse_sparse(metric, leaves)
        number = next(n for n, known in enumerate(metrics_of(self.model)) if known is metric)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        masks = {n: mask_of(leaf) for n, leaf in enumerate(tensors) if is_masked(leaf)}

        def note(count: np.ndarray, *values: np.ndarray) -> None:
            remaining = iter(values)
            seen = [next(remaining) if tf.is_tensor(leaf) else leaf for leaf in leaves]
            if count:
                nest = keras.tree.pack_sequence_as((arguments, named), seen)
                self.log.append((number, nest, dict(zip(masks, remaining, strict=True))))

        count = tf.constant(1) if rows is None else tf.cast(rows, tf.int32)
        tf.numpy_function(note, [count, *tensors, *masks.values()], [])

    def show_all(self, communicator: Communicator) -> None:
        """Update metrics with the recorded arguments of all ranks, in rank order (collective)."""
        metrics = metrics_of(self.model)
        for metric in metrics:
            if not adds_up(self.model, metric):
                metric.reset_state()
        logs = communicator.allgather(self.log, "what metrics saw")
        self.log.clear()
        for number, nest, masks in chain(*logs):
            leaves = [
                tf.constant(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
                for leaf in keras.tree.flatten(nest)
            ]
            tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
            for place, mask in masks.items():
                attach_mask(tensors[place], tf.constant(mask))
            arguments, named = keras.tree.pack_sequence_as(nest, leaves)
            metrics[number].update_state(*arguments, **named)


def _refuse_sparse(metric: keras.metrics.Metric, leaves: list[tf.Tensor]) -> None:
    if any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in leaves):
        raise InvalidInput(
            f"metric {metric.name!r} ({type(metric).__name__}) receives ragged or sparse values, "
            "which ranks do not gather; give it dense values (to_tensor, tf.sparse.to_dense)"
        )


def _is_batch(value: tf.Tensor, rows: Rows) -> bool:
    """Return whether a tensor has one row per sample, or one row in place of an empty batch."""
    if not tf.is_tensor(value) or value.shape.rank == 0:
        return False
    known = None if value.shape.rank is None else value.shape[0]
    return known is None or (isinstance(rows, int) and known == max(rows, 1))


def _is_number(value: tf.Tensor) -> bool:
    return bool(tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating)
