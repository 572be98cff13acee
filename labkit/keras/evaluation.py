"""Metrics and predictions of a model over the data of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, seam, synchronized
from labkit.keras.failed_fits import begin_evaluation
from labkit.keras.whole_batch import WholeBatch
from labkit.keras.whole_metrics import SeenByMetrics, WholeMetrics, adds_up, metrics_of

Arrays: TypeAlias = np.ndarray | list[np.ndarray] | dict[str, np.ndarray]
Data: TypeAlias = "tf.data.Dataset | Arrays | tuple[Arrays, ...]"


def evaluate(
    model: keras.Model,
    data: Data | None,
    communicator: Communicator,
    sharded: bool = False,
    **options: JSON,
) -> dict[str, float]:
    """Metrics of the model over the data of all ranks; each rank brings its own part.

    Metrics of the user's own see the batches of all ranks, with `sharded` joined, else those of
    rank 0 first. Losses are means over batches, by rows. Where a batch's is no mean over rows
    (sums, masks, weighted means), it matters which rows share a batch: with `sharded`, those of
    all ranks' parts.

    Args:
        model: compiled model, with the same weights on every rank.
        data: this rank's part, as `model.evaluate` takes it; None where a rank has none.
        communicator: the ranks.
        sharded: the data are what `shard` makes of global batches: every rank has as many.
        options: passed to `model.evaluate`.
    """
    begin_evaluation(model, communicator)
    have = communicator.allgather(data is not None, "evaluate")
    if not any(have):
        raise InvalidInput("no rank has data to evaluate on")
    with_data = communicator.split(int(data is not None))  # elsewhere metrics may not be built
    result: dict[str, float] = {}
    if data is not None:
        seam(model).put_on(IgnoreEmpty(model), stays=True)
        # Also in the middle of a fit, whose own hook comes back afterwards.
        together = sharded and communicator.size > 1
        whole = WholeBatch(model, communicator, tests=together)
        seen = None if together else SeenByMetrics.of(model)
        updates = seen or WholeMetrics(model)
        given = data if isinstance(data, tuple) else (data,)
        with seam(model).instead(whole), seam(model).instead(updates):
            # Of the class: what a callback calls is otherwise of this rank alone.
            type(model).evaluate(model, *given, verbose=0, **options)
        found = global_metrics(model, with_data, model.get_metrics_result, seen)
        result = {name: float(value) for name, value in found.items()}
    with_data.close()
    return dict(communicator.share(result, have.index(True), "evaluate"))


def predict(model: keras.Model, x: Arrays, communicator: Communicator, **options: JSON) -> Arrays:
    """The model's predictions for x, each rank computing a part; all ranks get all of them."""
    ends = cut(len(keras.tree.flatten(x)[0]), [1.0] * communicator.size)
    first, last = ends[communicator.rank], ends[communicator.rank + 1]
    own = keras.tree.map_structure(lambda leaf: leaf[first:last], x)
    part = model.predict(own, verbose=0, **options) if last > first else None
    parts = [p for p in communicator.allgather(part, "predict") if p is not None]
    joined: Arrays = keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
    return joined


def global_metrics(
    model: keras.Model,
    communicator: Communicator,
    result: Callable[[], Logs],
    seen: SeenByMetrics | None = None,
) -> dict[str, np.ndarray]:
    """The result of the model's metrics over all ranks, from states that add up (collective).

    Args:
        model: compiled; afterwards the states of its metrics are those of this rank again.
        communicator: the ranks.
        result: of the metrics.
        seen: what the other metrics saw on this rank; None: they have seen whole batches.
    """
    metrics = metrics_of(model)
    before = [(state, state.numpy()) for metric in metrics for state in metric.variables]
    if seen is not None:
        seen.show_all(communicator)
    states = [v for metric in metrics if adds_up(model, metric) for v in metric.variables]
    local = [state.numpy() for state in states]
    total = np.concatenate([np.zeros(0), *(np.ravel(value) for value in local)])
    total = communicator.tally(total, "metrics")
    for state, value, part in zip(
        states, local, np.split(total, np.cumsum([v.size for v in local]))[:-1], strict=True
    ):
        state.assign(part.reshape(value.shape).astype(value.dtype))
    found = {name: np.asarray(value) for name, value in result().items()}
    for state, value in before:
        state.assign(value)
    return found


@dataclass(frozen=True)
class IgnoreEmpty(Hook):
    """A batch without rows counts nothing in `model.evaluate`; it would not be a number."""

    name: ClassVar[str] = "tests"

    model: keras.Model

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Metrics do not see a batch without rows."""
        return leave_no_trace_if_empty(self.model, inner, data, rows)


def leave_no_trace_if_empty(
    model: keras.Model, step: Callable[[Batch], Logs], data: Batch, rows: Rows
) -> Logs:
    """One step in which a batch without rows changes neither metrics nor statistics.

    Layers never see an empty batch: a row of zeros stands in, and its gradient has no weight.
    States that all ranks change alike, whatever their rows, are left to change.
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
    alike = [*synchronized(model), *(each for each in layers if isinstance(each, spectral))]
    left = {id(variable) for layer in alike for variable in layer.non_trainable_variables}
    known = [*model.non_trainable_variables, *model.metrics_variables]
    state = [variable for variable in known if id(variable) not in left]
    before = [tf.identity(variable.value) for variable in state]
    seam(model).alike.clear()
    logs = step(keras.tree.map_structure(with_stand_in, data))
    for variable, value in zip(state, before, strict=True):
        if id(variable) not in seam(model).alike:
            variable.assign(tf.where(empty, value, variable.value))
    return logs
