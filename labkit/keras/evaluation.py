"""Evaluation of a model over the data of all ranks, and prediction by all ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias
from weakref import WeakKeyDictionary, ref

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.communicator import Communicator
from labkit.communicator.world import RecoveryBarrier
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, hooks_of, synchronized
from labkit.keras.optimizer import distributed_optimizers
from labkit.keras.whole_batch import WholeBatch
from labkit.keras.whole_metrics import SeenByMetrics, WholeMetrics, adds_up, metrics_of

_RESERVES: WeakKeyDictionary[Communicator, RecoveryBarrier] = WeakKeyDictionary()
# The constant _FIT is the code object of Keras's own method `fit`, not of a subclass's method.
_FIT = inspect.unwrap(keras.Model.fit).__code__
# The dict _FITTED maps each communicator to the model whose `fit` is in progress.
_FITTED: WeakKeyDictionary[Communicator, ref[keras.Model]] = WeakKeyDictionary()


def prepare_restarts(communicator: Communicator) -> None:
    """Allow all ranks to call `fit` again after a failed `fit` (collective)."""
    from mpi4py import MPI

    if communicator.size > 1:
        _RESERVES[communicator] = RecoveryBarrier(MPI.COMM_WORLD, communicator)


def begin_fit(model: keras.Model, communicator: Communicator) -> None:
    """Wait for all ranks; after a failed `fit`, reset their shared state (collective).

    A `fit` inside another `fit`, for example in a callback, neither waits nor resets.
    """
    fitted = _FITTED.get(communicator)
    exclude_current = fitted is not None and fitted() is model
    if not is_inside_fit(communicator, exclude_current):
        _restart_after_failure(model, communicator)
        _FITTED[communicator] = ref(model)


def begin_evaluation(model: keras.Model, communicator: Communicator) -> None:
    """Wait for all ranks before an evaluation; reset state after a failed `fit` (collective)."""
    if not is_inside_fit(communicator):
        _restart_after_failure(model, communicator)


def end_fit(model: keras.Model, communicator: Communicator) -> None:
    """Record that the `fit` of `model` has ended on this rank."""
    fitted = _FITTED.get(communicator)
    if fitted is not None and fitted() is model:
        del _FITTED[communicator]


def _restart_after_failure(model: keras.Model, communicator: Communicator) -> None:
    reserve = _RESERVES.get(communicator)
    if reserve is None:
        return
    failure = str(communicator.wait_policy.first_error or "")
    if _FITTED.pop(communicator, None) is not None:
        failure = failure or "its fit ended early"
    exchanges = [optimizer.exchange for optimizer in distributed_optimizers(model)]

    def settle() -> None:
        for exchange in exchanges:
            exchange.service.close()

    reserve.meet("the start of a fit or an evaluation", failure, settle)
    outdated = [exchange for exchange in exchanges if exchange.is_outdated]
    for exchange in outdated:
        exchange.reset(1.0)
    # After a reset, the compiled training function still refers to deleted gradient buckets.
    if outdated:
        hooks_of(model).discard_compiled()
        model.make_train_function()


def is_inside_fit(communicator: Communicator, exclude_current: bool = False) -> bool:
    """Return whether the call stack contains a `fit` whose ranks use the given communicator.

    Args:
        communicator: Communicator of the ranks that call `fit`.
        exclude_current: Whether to ignore the `fit` in which the caller itself runs.
    """
    fitted = _FITTED.get(communicator)
    model = None if fitted is None else fitted()
    count, frame = 0, sys._getframe()
    while model is not None and (outer := frame.f_back) is not None:
        frame = outer
        count += frame.f_code is _FIT and frame.f_locals.get("self") is model
    return count > exclude_current


Arrays: TypeAlias = np.ndarray | list[np.ndarray] | dict[str, np.ndarray]
Data: TypeAlias = "tf.data.Dataset | Arrays | tuple[Arrays, ...]"


def evaluate(
    model: keras.Model,
    data: Data | None,
    communicator: Communicator,
    sharded: bool = False,
    **options: JSON,
) -> dict[str, float]:
    """Evaluate a model over the data of all ranks; each rank passes its own part (collective).

    Metrics other than those of Keras receive the batches of all ranks. With `sharded`, the parts of
    all ranks are joined to one batch. Without `sharded`, metrics receive the batches one after the
    other, first those of rank 0. Losses are averaged over batches, weighted by the number of
    samples in each batch. A masked or weighted loss is not a mean over samples. The value of a
    masked loss depends on how samples are grouped into batches.

    Args:
        model: Compiled model, with the same weights on every rank.
        data: This rank's part of the data, in a form for `model.evaluate`. The value None means
            that the rank has no data.
        communicator: Communicator of the ranks that evaluate.
        sharded: Whether `data` is a result of `shard`, so that all ranks have the same number of
            batches.
        options: Further arguments of `model.evaluate`.

    Returns: A dict from metric name to the value over all ranks' data. Every rank gets the same
        metric values.
    """
    begin_evaluation(model, communicator)
    ranks_with_data = communicator.allgather(data is not None, "evaluate")
    if not any(ranks_with_data):
        raise InvalidInput("no rank has data to evaluate; give data on at least one rank")
    # Ranks without data have no built metrics, so `split` puts ranks without data into a separate
    # communicator.
    evaluating_ranks = communicator.split(int(data is not None))
    result: dict[str, float] = {}
    if data is not None:
        hooks_of(model).add_hook(IgnoreEmpty(model), stays=True)
        # During an evaluation inside a `fit`, the evaluation's hooks replace those of the `fit`.
        # The hooks for batches and metrics are replaced temporarily.
        together = sharded and communicator.size > 1
        whole = WholeBatch(model, communicator, tests=together)
        seen = None if together else SeenByMetrics.of(model)
        updates = seen or WholeMetrics(model)
        arguments = data if isinstance(data, tuple) else (data,)
        with hooks_of(model).replaced(whole), hooks_of(model).replaced(updates):
            # The method `evaluate` of the model's class is called, because inside a `fit`, a hook
            # replaces `model.evaluate`.
            type(model).evaluate(model, *arguments, verbose=0, **options)
        metrics = global_metrics(model, evaluating_ranks, model.get_metrics_result, seen)
        result = {name: float(value) for name, value in metrics.items()}
    evaluating_ranks.close()
    return dict(communicator.broadcast_object(result, ranks_with_data.index(True), "evaluate"))


def predict(model: keras.Model, x: Arrays, communicator: Communicator, **options: JSON) -> Arrays:
    """Predict a part of the samples x on each rank; return all predictions on every rank."""
    ends = cut(len(keras.tree.flatten(x)[0]), [1.0] * communicator.size)
    first, last = ends[communicator.rank], ends[communicator.rank + 1]
    rows = keras.tree.map_structure(lambda leaf: leaf[first:last], x)
    part = model.predict(rows, verbose=0, **options) if last > first else None
    parts = [p for p in communicator.allgather(part, "predict") if p is not None]
    joined: Arrays = keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
    return joined


def global_metrics(
    model: keras.Model,
    communicator: Communicator,
    result: Callable[[], Logs],
    counts: SeenByMetrics | None = None,
) -> dict[str, np.ndarray]:
    """Return the metrics over the data of all ranks (collective).

    Args:
        model: Compiled model; the function changes its metric states, and restores them before it
            returns.
        communicator: Communicator of the ranks whose metric states are summed.
        result: Function that returns the metrics from the model's metric states.
        counts: Recorded inputs of metrics whose states cannot be summed. The value None means that
            the metrics have already received all ranks' batches.
    """
    metrics = metrics_of(model)
    before = [(state, state.numpy()) for metric in metrics for state in metric.variables]
    if counts is not None:
        counts.show_all(communicator)
    states = [v for metric in metrics if adds_up(model, metric) for v in metric.variables]
    local = [state.numpy() for state in states]
    total = np.concatenate([np.zeros(0), *(np.ravel(value) for value in local)])
    total = communicator.allreduce_small(total, "metrics")
    for state, value, part in zip(
        states, local, np.split(total, np.cumsum([v.size for v in local]))[:-1], strict=True
    ):
        state.assign(part.reshape(value.shape).astype(value.dtype))
    values = {name: np.asarray(value) for name, value in result().items()}
    for state, value in before:
        state.assign(value)
    return values


@dataclass(frozen=True)
class IgnoreEmpty(Hook):
    """A hook by which `model.evaluate` ignores empty batches, whose mean would be NaN."""

    name: ClassVar[str] = "tests"

    model: keras.Model

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Run a test step; an empty batch does not change metrics."""
        return ignore_empty_batch(self.model, inner, data, rows)


def ignore_empty_batch(
    model: keras.Model, step: Callable[[Batch], Logs], data: Batch, rows: Rows
) -> Logs:
    """Run a step so that an empty batch changes neither metrics nor statistics.

    A sample of zeros replaces an empty batch, because layers may fail for empty batches. The sample
    of zeros contributes to the gradient with weight 0. Some states stay equal on all ranks, such as
    synchronized batch statistics. A state that is equal on all ranks changes even for an empty
    batch.
    """
    empty = tf.equal(rows, 0)
    missing = tf.cast(empty, tf.int32)

    def with_stand_in(leaf: tf.Tensor) -> tf.Tensor:
        if leaf is None:
            return None
        if isinstance(leaf, tf.SparseTensor):
            rows = tf.concat([tf.cast([missing], tf.int64), 0 * leaf.dense_shape[1:]], axis=0)
            padded = tf.SparseTensor(leaf.indices, leaf.values, leaf.dense_shape + rows)
            padded.set_shape([None, *leaf.shape[1:]])
            return padded
        if isinstance(leaf, tf.RaggedTensor):
            row = tf.RaggedTensor.from_tensor(
                tf.zeros(
                    [missing, *[1] * leaf.ragged_rank, *leaf.flat_values.shape[1:]], leaf.dtype
                ),
                ragged_rank=leaf.ragged_rank,
                row_splits_dtype=leaf.row_splits.dtype,
            )
            return tf.concat([leaf, row], axis=0)
        extra = tf.zeros(tf.concat([[missing], tf.shape(leaf)[1:]], axis=0), leaf.dtype)
        padded = tf.concat([leaf, extra], axis=0)
        length = leaf.shape[0]
        padded.set_shape([length if length is None else max(length, 1), *leaf.shape[1:]])
        return padded

    spectral = keras.layers.SpectralNormalization
    layers = model._flatten_layers(include_self=False)
    synchronized_layers = [
        *synchronized(model),
        *(layer for layer in layers if isinstance(layer, spectral)),
    ]
    unchanged = {
        id(variable) for layer in synchronized_layers for variable in layer.non_trainable_variables
    }
    known = [*model.non_trainable_variables, *model.metrics_variables]
    state = [variable for variable in known if id(variable) not in unchanged]
    before = [tf.identity(variable.value) for variable in state]
    hooks_of(model).alike.clear()
    logs = step(keras.tree.map_structure(with_stand_in, data))
    for variable, value in zip(state, before, strict=True):
        if id(variable) not in hooks_of(model).alike:
            variable.assign(tf.where(empty, value, variable.value))
    return logs
