"""Metrics whose states do not add up over ranks: each sees the whole batch, on every rank."""

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
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, seam
from labkit.keras.sums import Sums
from labkit.keras.whole_batch import WholeBatch
from labkit.model_parallel.functional import is_masked, mask_of, masked

# Number of the metric; arguments by place and by name; masks of their tensors, by number.
Seen: TypeAlias = "tuple[int, tuple[tuple[Any, ...], dict[str, Any]], dict[int, np.ndarray]]"


def adds_up(model: keras.Model, metric: keras.metrics.Metric) -> bool:
    """Whether the states of a metric over parts of the data add up to those over all.

    They do in Keras's own classes that a model is compiled with, and in the means of its losses. A
    function may return one number for a batch, and a class or a `train_step` of the user's own may
    do anything with what it sees.
    """
    kind = type(metric)
    if kind is keras.metrics.Sum:
        return True
    compiled = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss")]
    known = [model._loss_tracker, *(m for each in compiled if each for m in each.metrics)]
    is_function = kind is keras.metrics.MeanMetricWrapper
    is_kerass = kind.__module__.partition(".")[0] == "keras" and not is_function
    return is_kerass and any(metric is each for each in known)


def metrics_of(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, among them those that it is compiled with."""
    groups = [m.metrics if isinstance(m, CompileMetrics) else [m] for m in model.metrics]
    return [metric for group in groups for metric in group]


@dataclass(frozen=True)
class _Updates(Hook):
    """Stands before each metric whose states do not add up."""

    name: ClassVar[str] = "updates"

    model: keras.Model

    def update_state(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *given: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """Of the collection of compiled metrics, stand before its members."""
        if not isinstance(metric, CompileMetrics):
            own = inner if adds_up(self.model, metric) else partial(self.see, inner, rows, metric)
            own(*given, **named)
            return
        if not metric.built:
            metric.build(*given[:2])
        others = [
            each
            for each in metric.metrics
            if not adds_up(self.model, each) and "update_state" not in vars(each)
        ]  # one that the model keeps in an attribute, too, has its hook already
        for each in others:
            each.update_state = partial(self.see, each.update_state, rows, each)
        try:
            inner(*given, **named)
        finally:
            for each in others:
                del each.update_state

    def see(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *given: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """What such a metric sees of a batch; traced."""
        raise NotImplementedError


@dataclass(frozen=True)
class WholeMetrics(_Updates):
    """Metrics see the batch of all ranks, in the order of ranks, and have the same states on all.

    A number of a part, such as a loss of a `train_step` of the user's own, counts as a mean over
    its rows.

    Args:
        model: whose seam has a `WholeBatch`, too.
    """

    @property
    def sums(self) -> Sums:
        """What adds up over the ranks in a step."""
        whole = next(hook for hook in seam(self.model).hooks if isinstance(hook, WholeBatch))
        return whole.sums

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Numbers that are no results of metrics are those of the whole batch."""
        return self._logs(inner(data), rows)

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Likewise."""
        return self._logs(inner(data), rows)

    def _logs(self, logs: Logs, rows: Rows) -> Logs:
        sums = self.sums
        # The result of a metric may be its variable itself.
        logs = {
            name: each.value if isinstance(each, keras.Variable) else each
            for name, each in logs.items()
        }
        numbers = {name: each for name, each in logs.items() if _is_number(each)}
        # Where these are the names of the metrics, Keras asks the metrics once more.
        if not (sums.within and numbers) or logs.keys() == self.model.get_metrics_result().keys():
            return logs
        means = sums.mean(list(numbers.values()), rows, "logs")
        return logs | dict(zip(numbers, means, strict=True))

    def see(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *given: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """What all ranks have of it."""
        sums = self.sums
        if not sums.within or rows is None:
            inner(*given, **named)
            return
        leaves = keras.tree.flatten((given, named))
        _refuse_odd(metric, leaves)
        batches = [leaf for leaf in leaves if _is_batch(leaf, rows)]
        masks = [mask_of(leaf) for leaf in batches]
        numbers = [leaf for leaf in leaves if _is_number(leaf)]
        values = [*batches, *(mask for mask in masks if mask is not None)]
        joined = iter(sums.gather(values, rows, "values of a metric") if values else [])
        means = sums.mean(numbers, rows, "numbers of a metric") if numbers else []
        new = {id(leaf): next(joined) for leaf in batches}
        new |= {id(leaf): mean for leaf, mean in zip(numbers, means, strict=True)}
        for leaf, mask in zip(batches, masks, strict=True):
            masked(new[id(leaf)], None if mask is None else next(joined))
        given, named = keras.tree.map_structure(lambda v: new.get(id(v), v), (given, named))
        inner(*given, **named)
        seam(self.model).alike |= {id(variable) for variable in metric.variables}


@dataclass(frozen=True, eq=False)
class SeenByMetrics(_Updates):
    """What metrics see on this rank, to be shown afterwards to those of all ranks.

    There is one of a model: what Keras has compiled with it is used again.
    """

    log: list[Seen] = field(default_factory=list)

    @classmethod
    def of(cls, model: keras.Model) -> SeenByMetrics:
        """That of a model."""
        found: SeenByMetrics | None = vars(model).get("_labkit_seen")
        if found is None:
            found = model._labkit_seen = cls(model)
        return found

    def see(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *given: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """Note it; the metric sees it, too, as it may be made by this."""
        inner(*given, **named)
        leaves = keras.tree.flatten((given, named))
        _refuse_odd(metric, leaves)
        number = next(n for n, each in enumerate(metrics_of(self.model)) if each is metric)
        tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
        masks = {n: mask_of(leaf) for n, leaf in enumerate(tensors) if is_masked(leaf)}

        def note(count: np.ndarray, *values: np.ndarray) -> None:
            own = iter(values)
            seen = [next(own) if tf.is_tensor(leaf) else leaf for leaf in leaves]
            if count:
                nest = keras.tree.pack_sequence_as((given, named), seen)
                self.log.append((number, nest, dict(zip(masks, own, strict=True))))

        count = tf.constant(1) if rows is None else tf.cast(rows, tf.int32)
        tf.numpy_function(note, [count, *tensors, *masks.values()], [])

    def show_all(self, communicator: Communicator) -> None:
        """Show each metric what it saw on all ranks, from the first on (collective)."""
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
                masked(tensors[place], tf.constant(mask))
            given, named = keras.tree.pack_sequence_as(nest, leaves)
            metrics[number].update_state(*given, **named)


def _refuse_odd(metric: keras.metrics.Metric, leaves: list[tf.Tensor]) -> None:
    if any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in leaves):
        raise InvalidInput(
            f"metric {metric.name!r} ({type(metric).__name__}) sees ragged or sparse values, which "
            "ranks do not gather; give it dense ones (to_tensor, tf.sparse.to_dense)"
        )


def _is_batch(value: tf.Tensor, rows: Rows) -> bool:
    """Whether a tensor has a row for each one of the batch, or what stands in for none."""
    if not tf.is_tensor(value) or value.shape.rank == 0:
        return False
    known = None if value.shape.rank is None else value.shape[0]
    return known is None or (isinstance(rows, int) and known == max(rows, 1))


def _is_number(value: tf.Tensor) -> bool:
    return bool(tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating)
