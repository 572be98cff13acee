"""The drop-in: data parallel training of a user's own Keras model, in a script or a cell.

    communicator = init()
    model.compile(optimizer=DistributedOptimizer(keras.optimizers.SGD(0.1), communicator), ...)
    model.fit(shard(dataset, communicator), callbacks=callbacks(communicator))

Every rank runs these lines. The mean of the gradients is taken where the optimizer applies them,
so a `train_step` of the user's own keeps working.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from labkit.common.content import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.rows import cut
from labkit.communicator import Communicator, world
from labkit.compression import Compressor
from labkit.exchange import Exchange
from labkit.exchange.seam import Batch, Hook, Logs, Rows, Variables, optimizers, rows_of, seam


def init(limit: float = 600.0) -> Communicator:
    """Join the ranks that mpiexec started; on GPU machines take the device of the local rank.

    Args:
        limit: seconds after which waiting for another rank raises.
    """
    communicator = world(limit=limit)
    atexit.register(communicator.leave)
    use_one_device(communicator)
    return communicator


def use_one_device(communicator: Communicator) -> None:
    """Show TensorFlow one GPU a rank of this host, with memory that grows; without GPUs nothing."""
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return
    own = devices[communicator.local_rank % len(devices)]
    # Both calls do nothing where that is so already, also when TensorFlow has started.
    tf.config.set_visible_devices(own, "GPU")
    tf.config.experimental.set_memory_growth(own, True)


def DistributedOptimizer(  # noqa: N802 - named as the class that it stands for
    optimizer: Any, communicator: Communicator, **exchange: Any
) -> Any:
    """An optimizer of the same kind that applies the mean gradient of all ranks.

    It stands outside Keras's loss scaling: the scaled gradients are averaged first, so an
    overflow on one rank is an overflow on all, and all skip the step together. It is saved as
    the plain optimizer, so a saved model opens without labkit.

    `fit` switches XLA off for it and counts each rank by its rows; for `train_on_batch` call
    `attach(model)` after `compile`, which does the same. In a loop of your own set `rows` of the
    optimizer before `apply`, inside the traced step; without it every rank counts the same.

    Args:
        optimizer: a Keras optimizer, or the name of one.
        communicator: the ranks.
        exchange: algorithm, schedule, bucket_bytes, compressor and seed; see `Exchange`.

    Raises:
        InvalidInput: a schedule that is impossible here; a compressor that the optimizer does not
            go with.
    """
    if exchange.get("schedule") == "priority":
        raise InvalidInput(
            "schedule='priority' reaches over two steps and cannot live in an optimizer; "
            "use lk.AllReduce(schedule='priority') in an experiment, or 'overlap' here"
        )
    plain = keras.optimizers.get(optimizer)
    scaled = isinstance(plain, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scaled:
        # compile() would wrap us, and a wrapped optimizer is not called when a rank overflows.
        plain = keras.optimizers.LossScaleOptimizer(plain)
    kind = type(plain)

    def apply(self: Any, grads: Any, trainable_variables: Any = None, rows: Any = None) -> Any:
        variables = trainable_variables or self._trainable_variables
        names = [variable.path for variable in variables]
        scale = getattr(self, "dynamic_scale", None)
        counted = self.rows if rows is None else rows
        mean = self.exchange.mean(list(grads), counted, names, scale)
        return kind.apply(self, mean, trainable_variables)

    members = {"apply": apply, "rows": None, "__module__": kind.__module__}
    subclass: Any = type(kind.__name__, (kind,), members)
    distributed = copy_of(plain, subclass)
    distributed.exchange = Exchange(communicator, **exchange)
    if distributed.exchange.compressor is not None:
        check_compressor(distributed.exchange.compressor, plain)
    if plain.built:
        distributed.build(plain._trainable_variables)
        for own, given in zip(distributed.variables, plain.variables, strict=True):
            own.assign(given)
    return distributed


def check_compressor(compressor: Compressor, optimizer: Any) -> None:
    """Refuse a compressor that contradicts an optimizer, wherever that one comes from."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config: dict[str, JSON] = inner.get_config()
    plain = {name: value for name, value in config.items() if isinstance(value, int | float | str)}
    compressor.check(type(inner).__name__.lower(), plain)


def copy_of(optimizer: Any, kind: Any = None) -> Any:
    """A new optimizer of the same settings, without state; of another class where one is given."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Classes of the user's own, such as a schedule, need not be registered with Keras.
    own = {known.__name__: known for known in (type(inner), type(inner._learning_rate))}
    with keras.saving.custom_object_scope(own):
        return (kind or type(optimizer)).from_config(optimizer.get_config())


def shard(
    dataset: tf.data.Dataset, communicator: Communicator, capacities: Sequence[float] | None = None
) -> tf.data.Dataset:
    """This rank's part of every global batch.

    All ranks must see the same global batches: give `shuffle` a seed. A part may have no rows;
    every rank then still takes the same number of steps.

    Args:
        dataset: batches of the global size.
        communicator: the ranks.
        capacities: a rank's share of each batch; default: equal.
    """
    shares = capacities or [1.0] * communicator.size
    if len(shares) != communicator.size or min(shares) <= 0:
        raise InvalidInput(
            f"capacities={list(shares)}: give {communicator.size} numbers above 0, one a rank"
        )
    # The boundary of every rank for every size, by the same arithmetic as `plan.cut`.
    cumulative = np.concatenate([[0.0], np.cumsum(shares)]) / np.sum(shares)

    def own_part(*batch: Any) -> Any:
        rows = tf.cast(rows_of(batch), tf.float64)
        first, last = (
            tf.cast(tf.floor(rows * cumulative[communicator.rank + side] + 1e-9), tf.int64)
            for side in (0, 1)
        )
        part = keras.tree.map_structure(lambda leaf: leaf[first:last], batch)
        return part if len(part) > 1 else part[0]

    return dataset.map(own_part, num_parallel_calls=1).prefetch(2)


def callbacks(communicator: Communicator) -> list[keras.callbacks.Callback]:
    """What `fit` needs on every rank: equal initial weights, right weighting, metrics of all."""
    return [Synchronize(communicator)]


class Synchronize(keras.callbacks.Callback):
    """Keeps replicas in step: rank 0's weights at the start, metrics over all ranks at the end.

    While it is attached, the gradients of each rank count by the rows of its batch, a batch
    without rows leaves no trace, and the metrics that `fit` reports are those of the global data:
    the states of the metrics are summed over the ranks before their result is taken.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator

    def set_model(self, model: Any) -> None:
        """Prepare the model before its training function is made.

        Raises:
            InvalidInput: gradients would not be exchanged.
        """
        super().set_model(model)
        _prepare(model)
        seam(model).put_on(CountRows(model))
        seam(model).put_on(IgnoreEmpty(model))

    def on_train_begin(self, logs: Any = None) -> None:
        """Give every rank the weights of rank 0."""
        if not self.model.built:
            raise LabkitError("the model has no weights yet: call model.build(input_shape) first")
        states = [v for each in _optimizers(self.model) for v in each.variables]
        broadcast(self.model.variables + states, self.communicator)
        seam(self.model).put_on(GlobalMetrics(self.model, self.communicator))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average over the ranks what a `train_step` of the user's own reports.

        Callbacks after this one then decide alike on all ranks.
        """
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names])
        total = self.communicator.tally(values, "the epoch's metrics")
        logs.update(zip(names, (total / self.communicator.size).tolist(), strict=True))

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the model as it was, so that one rank alone may evaluate."""
        seam(self.model).take_off("rows", "tests", "metrics")


def attach(model: Any) -> None:
    """Let the model's optimizers know how many rows are behind each rank's gradients; XLA off.

    Those are the one that it is compiled with, and what a `train_step` of its own keeps in
    attributes of the model.

    Raises:
        InvalidInput: there is none: gradients would not be exchanged.
    """
    _prepare(model)
    seam(model).put_on(CountRows(model), stays=True)
    seam(model).put_on(IgnoreEmpty(model), stays=True)


def _prepare(model: Any) -> None:
    own = _optimizers(model)
    if not own:
        raise InvalidInput(
            "the model's optimizer exchanges no gradients: compile with "
            "optimizer=DistributedOptimizer(optimizer, communicator), made after "
            "keras.config.set_dtype_policy"
        )
    if model.jit_compile:
        if own[0].exchange.communicator.rank == 0:
            print("labkit: jit_compile is off: XLA cannot call MPI", file=sys.stderr)
        model.jit_compile = False
        model.train_function = None


def _optimizers(model: Any) -> list[Any]:
    """The distributed optimizers that a model has."""
    return [each for each in optimizers(model) if hasattr(each, "exchange")]


@dataclass(frozen=True)
class IgnoreEmpty(Hook):
    """A batch without rows counts nothing in `model.evaluate`; it would not be a number."""

    name: ClassVar[str] = "tests"

    model: keras.Model

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Metrics do not see a batch without rows."""
        return _leave_no_trace_if_empty(self.model, inner, data, rows)


@dataclass(frozen=True)
class CountRows(Hook):
    """The gradients of a rank count by its rows, and a batch without rows leaves no trace."""

    name: ClassVar[str] = "rows"

    model: keras.Model

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Layers never see an empty batch."""
        if tf.get_static_value(rows) is not None:
            return inner(data)
        return _leave_no_trace_if_empty(self.model, inner, data, rows)

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
        for optimizer in _optimizers(self.model):
            optimizer.exchange.service.settle()  # one thread at a time
        return global_metrics(self.model, self.communicator, inner)


def broadcast(variables: Sequence[Any], communicator: Communicator) -> None:
    """Give every rank the values that the variables have on rank 0.

    Random layers draw differently on each rank: the rank is added to their seeds.

    Raises:
        InvalidInput: ranks have other variables than rank 0.
    """
    own = [(str(variable.dtype), tuple(variable.shape)) for variable in variables]
    told = communicator.allgather(own, "the agreement on the variables")
    for rank, other in enumerate(told):
        if other != told[0]:
            pairs = zip(told[0], other, strict=False)
            first = next(((a, b) for a, b in pairs if a != b), (len(told[0]), len(other)))
            raise InvalidInput(
                f"rank 0 and rank {rank} have different variables: {first[0]} and {first[1]}; "
                "give every rank the same model, optimizer, keras floatx and dtype policy"
            )
    for number, variable in enumerate(variables):
        value = np.array(variable.numpy(), order="C")
        # By number: Keras counts the names of layers on, and ranks may have made more of them.
        communicator.broadcast(value, what=f"the broadcast of variable {number}")
        if variable.name == "seed_generator_state":
            value[0] += communicator.rank
        variable.assign(value)


def evaluate(model: Any, data: Any, communicator: Communicator, **options: Any) -> dict[str, float]:
    """Metrics of the model over the data of all ranks; each rank brings its own part.

    Args:
        model: compiled model, with the same weights on every rank.
        data: this rank's part, as `model.evaluate` takes it; None where a rank has none.
        communicator: the ranks.
        options: passed to `model.evaluate`.
    """
    have = communicator.allgather(data is not None, "evaluate")
    if not any(have):
        raise InvalidInput("no rank has data to evaluate on")
    with_data = communicator.split(int(data is not None))  # elsewhere metrics may not be built
    result: dict[str, float] = {}
    if data is not None:
        seam(model).put_on(IgnoreEmpty(model), stays=True)
        model.evaluate(*(data if isinstance(data, tuple) else (data,)), verbose=0, **options)
        found = global_metrics(model, with_data, model.get_metrics_result)
        result = {name: float(value) for name, value in found.items()}
    with_data.close()
    return dict(communicator.share(result, have.index(True), "evaluate"))


def predict(model: Any, x: Any, communicator: Communicator, **options: Any) -> Any:
    """The model's predictions for x, each rank computing a part; all ranks get all of them."""
    ends = cut(len(keras.tree.flatten(x)[0]), [1.0] * communicator.size)
    first, last = ends[communicator.rank], ends[communicator.rank + 1]
    own = keras.tree.map_structure(lambda leaf: leaf[first:last], x)
    part = model.predict(own, verbose=0, **options) if last > first else None
    parts = [p for p in communicator.allgather(part, "predict") if p is not None]
    return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)


def global_metrics(model: Any, communicator: Communicator, result: Any) -> dict[str, Any]:
    """The result of the model's metrics, from states summed over the ranks."""
    states = [v for metric in model.metrics for v in metric.variables]
    local = [state.numpy() for state in states]
    total = np.concatenate([np.zeros(0), *(np.ravel(value) for value in local)])
    total = communicator.tally(total, "metrics")
    for state, value, part in zip(
        states, local, np.split(total, np.cumsum([v.size for v in local]))[:-1], strict=True
    ):
        state.assign(part.reshape(value.shape).astype(value.dtype))
    metrics = {name: np.asarray(value) for name, value in result().items()}
    for state, value in zip(states, local, strict=True):
        state.assign(value)
    return metrics


def _leave_no_trace_if_empty(
    model: keras.Model, step: Callable[[Batch], Logs], data: Batch, rows: Rows
) -> Logs:
    """One step in which a batch without rows changes neither metrics nor statistics.

    Layers never see an empty batch: a row of zeros stands in, and its gradient has no weight.
    """
    empty = tf.equal(rows, 0)
    missing = tf.cast(empty, tf.int32)

    def with_stand_in(leaf: Any) -> Any:
        extra = tf.zeros(tf.concat([[missing], tf.shape(leaf)[1:]], axis=0), leaf.dtype)
        padded = tf.concat([leaf, extra], axis=0)
        padded.set_shape(leaf.shape)
        return padded

    state = [*model.non_trainable_variables, *model.metrics_variables]
    before = [tf.identity(variable.value) for variable in state]
    logs = step(keras.tree.map_structure(with_stand_in, data))
    for variable, value in zip(state, before, strict=True):
        variable.assign(tf.where(empty, value, variable.value))
    return logs
