"""Replicas in step: what a model's `fit` needs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Communicator
from labkit.exchange.seam import Batch, Hook, Logs, Rows, Variables, seam, synchronized
from labkit.keras.by_nature import Division, why_not
from labkit.keras.equal_batches import EqualBatches
from labkit.keras.evaluation import IgnoreEmpty, global_metrics, leave_no_trace_if_empty
from labkit.keras.optimizer import distributed_optimizers
from labkit.keras.sharding import check_fixed_batch
from labkit.keras.whole_batch import WholeBatch, say_on_first


def callbacks(communicator: Communicator) -> list[keras.callbacks.Callback]:
    """What `fit` needs on every rank: equal initial weights, right weighting, metrics of all."""
    return [Synchronize(communicator, names=True), EqualBatches(communicator)]


class Synchronize(keras.callbacks.Callback):
    """Keeps replicas in step: rank 0's weights at the start, metrics over all ranks at the end.

    While it is attached, the gradients of each rank count by the rows of its batch, a batch
    without rows leaves no trace, and the metrics that `fit` reports are those of the global data:
    the states of the metrics are summed over the ranks before their result is taken. Losses and
    synchronized normalizations are of the global batch, see `WholeBatch`; the moving statistics of
    other normalizations are averaged over the ranks before each validation and after each epoch.

    Args:
        communicator: the ranks.
        names: say at the start what will differ from one process by nature.
    """

    def __init__(self, communicator: Communicator, names: bool = False) -> None:
        super().__init__()
        self.communicator, self._names = communicator, names

    def set_model(self, model: keras.Model) -> None:
        """Prepare the model before its training function is made.

        Raises:
            InvalidInput: gradients would not be exchanged.
        """
        super().set_model(model)
        _prepare(model)
        seam(model).put_on(CountRows(model))
        seam(model).put_on(IgnoreEmpty(model))
        if self.communicator.size > 1:
            seam(model).put_on(WholeBatch(model, self.communicator, tests=True))

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Give every rank the weights of rank 0."""
        if not self.model.built:
            raise LabkitError("the model has no weights yet: call model.build(input_shape) first")
        states = [v for each in distributed_optimizers(self.model) for v in each.variables]
        broadcast(self.model.variables + states, self.communicator)
        seam(self.model).put_on(GlobalMetrics(self.model, self.communicator))
        size = self.communicator.size
        divided = Division(size, microbatches=False, synchronizes=True)
        if self._names and size > 1 and (reason := why_not(self.model, divided)):
            say_on_first(self.communicator, f"training differs from that of one process: {reason}")

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        """Validate with the same statistics on all ranks."""
        average_statistics(self.model, self.communicator)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Average over the ranks what a `train_step` of the user's own reports.

        Callbacks after this one then decide alike on all ranks.
        """
        average_statistics(self.model, self.communicator)
        if not logs:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([float(logs[name]) for name in names])
        total = self.communicator.tally(values, "the epoch's metrics")
        logs.update(zip(names, (total / self.communicator.size).tolist(), strict=True))

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Leave the model as it was, so that one rank alone may evaluate."""
        seam(self.model).take_off("rows", "tests", "metrics", "whole")


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
    """The gradients of a rank count by its rows, and a batch without rows leaves no trace."""

    name: ClassVar[str] = "rows"

    model: keras.Model

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Layers never see an empty batch."""
        if distributed_optimizers(self.model)[0].exchange.communicator.size > 1:
            check_fixed_batch(self.model, rows)
        if tf.get_static_value(rows):
            return inner(data)
        return leave_no_trace_if_empty(self.model, inner, data, rows)

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
        return global_metrics(self.model, self.communicator, inner)


def broadcast(
    variables: Sequence[keras.Variable], communicator: Communicator, root: int = 0
) -> None:
    """Give every rank the values that the variables have on rank 0, or another.

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
        communicator.broadcast(value, root, f"the broadcast of variable {number}")
        if variable.name == "seed_generator_state":
            value[0] += communicator.rank
        variable.assign(value)


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
