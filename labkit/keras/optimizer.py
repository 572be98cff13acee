"""Distributed Keras optimizers, which apply the mean gradient of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import keras
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.nearest import named_arguments
from labkit.communicator import Communicator
from labkit.compression import Compressor
from labkit.exchange import SCHEDULES, Exchange, Guard, weight_by_rows
from labkit.exchange.hooks import Rows, Variables, optimizers
from labkit.keras.optimizer_state import view_of, without_replica_sum


class ExchangeOptions(TypedDict, total=False):
    """The options of a gradient exchange: arguments of `labkit.exchange.Exchange`."""

    algorithm: str
    schedule: str
    bucket_bytes: int | str
    compressor: Compressor | Mapping[str, JSON] | str | None
    seed: int
    guard: Guard | None


@named_arguments(*ExchangeOptions.__annotations__)
def DistributedOptimizer(  # noqa: N802 - named as a class, for which it stands
    optimizer: keras.optimizers.Optimizer | str,
    communicator: Communicator,
    **exchange: Unpack[ExchangeOptions],
) -> keras.optimizers.Optimizer:
    """Return an optimizer of the same class that applies the mean gradient of all ranks.

    The new optimizer shares all state with the given one: exclusions from weight decay, moments,
    attributes, and the learning rate, even if it changes later. Use only one of the given and the
    new optimizer for training.

    Gradients are averaged before Keras removes the loss scale. An overflow on one rank therefore
    makes the mean overflow on all ranks, so that all ranks skip the same step. Training in one
    process may skip different steps. A saved model contains the plain optimizer, and can be loaded
    without labkit.

    With `gradient_accumulation_steps=k`, each rank sums its own gradients, and the ranks exchange
    the sums only in every k-th step. In the steps between exchanges, ranks exchange only their
    numbers of samples. (With scaled losses, every step exchanges gradients, because all ranks must
    detect the same overflow.) Gradients of a large embedding are sent and applied as sparse rows.
    If a word occurs several times in a batch, its gradient row is applied once, as in a dense
    gradient.

    During `fit` with labkit's callbacks, XLA is off, and each rank's gradients are weighted by its
    number of samples. To have the same effects in `train_on_batch`, call `attach(model)` after
    `compile`. In a custom training loop, set the optimizer's attribute `rows` before `apply`,
    inside the traced step. Without `rows`, the gradients of all ranks have equal weights.

    Args:
        optimizer: Keras optimizer, or its name.
        communicator: Communicator of the ranks that average their gradients.
        exchange: Options of the exchange: `algorithm`, `schedule`, `bucket_bytes`, `compressor`,
            `seed` and `guard`; see `Exchange`.

    Raises:
        InvalidInput: The schedule spans two steps, or the optimizer is incompatible with the guard
            or the compressor.
    """
    schedule = SCHEDULES.get(exchange.get("schedule", ""))
    if schedule is not None and schedule.into_next:
        raise InvalidInput(
            f"schedule={schedule.name!r} spans two steps, which DistributedOptimizer does not "
            f"support; use schedule='overlap', or lk.AllReduce(schedule={schedule.name!r}) in an "
            "experiment"
        )
    plain = keras.optimizers.get(optimizer)
    guard = exchange.get("guard")
    if guard is not None and guard.policy == "skip" and plain.gradient_accumulation_steps:
        raise InvalidInput(
            "on_nonfinite='skip' does not support gradient_accumulation_steps, which adds up "
            "gradients over several steps; use on_nonfinite='stop' or 'clip'"
        )
    scaled = isinstance(plain, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scaled:
        # The plain optimizer is wrapped here; if compile() wrapped the distributed optimizer, Keras
        # would not call it after an overflow.
        plain = keras.optimizers.LossScaleOptimizer(plain)
    kind = type(plain)
    # If the optimizer is already distributed, its plain class is used, because gradients must be
    # exchanged only once.
    if "exchange" in vars(kind):
        kind = kind.__mro__[1]

    # Keras saves the plain optimizer under this name, which includes the package; the new class has
    # the same name.
    name = keras.saving.get_registered_name(kind)
    members = _members(kind) | {"exchange": Exchange(communicator, **exchange)}
    distributed = view_of(plain, type(name, (kind,), members))
    if distributed.exchange.compressor is not None:
        check_compressor(distributed.exchange.compressor, plain)
    return without_replica_sum(distributed)


def _members(
    kind: type[keras.optimizers.Optimizer],
) -> dict[str, Any]:
    """Return the methods and attributes that a distributed subclass of an optimizer has."""

    def apply(
        self: keras.optimizers.Optimizer,
        grads: list[tf.Tensor],
        trainable_variables: Variables = None,
        rows: Rows = None,
    ) -> tf.Tensor:
        variables = trainable_variables or self._trainable_variables
        names = [variable.path for variable in variables]
        scale = getattr(self, "dynamic_scale", None)
        row_count = self.rows if rows is None else rows
        _restore_shapes(grads, variables)
        if self.gradient_accumulation_steps:
            mean_gradients = weight_by_rows(self.exchange.communicator, grads, row_count)
        else:
            mean_gradients = self.exchange.mean(list(grads), row_count, names, scale)
        if self.loss_scale_factor is not None:  # Keras cannot apply the loss scale to IndexedSlices
            mean_gradients = [
                gradient if gradient is None else tf.convert_to_tensor(gradient)
                for gradient in mean_gradients
            ]
        if not self.exchange.may_skip:
            # If ranks may fail, either both the weights and the step counter change, or neither of
            # them.
            dependencies = mean_gradients if self.exchange.communicator.outlives else []
            with tf.control_dependencies(
                [gradient for gradient in dependencies if gradient is not None]
            ):
                return kind.apply(self, mean_gradients, trainable_variables)
        if not self.built:
            with tf.init_scope():
                self.build(variables)

        def apply_step() -> tf.Tensor:
            kind.apply(self, mean_gradients, trainable_variables)
            return tf.constant(True)

        return tf.cond(
            self.exchange.all_finite(mean_gradients), apply_step, lambda: tf.constant(False)
        )

    def clip(self: keras.optimizers.Optimizer, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        """In every k-th step, average accumulated gradients over the ranks; then clip gradients."""
        if self.gradient_accumulation_steps:
            known = self._trainable_variables
            names = [v.path for v in known] if len(known) == len(grads) else []
            grads = self.exchange.mean(list(grads), names=names)
        clipped: list[tf.Tensor] = kind._clip_gradients(self, grads)
        return clipped

    return {
        "apply": apply,
        "rows": None,
        "_clip_gradients": clip,
        "__module__": kind.__module__,
    }


def _restore_shapes(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
    """Set the static shapes of gradients, which TensorFlow may lose in masks and loops."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)


def check_compressor(compressor: Compressor, optimizer: keras.optimizers.Optimizer) -> None:
    """Raise InvalidInput if a compressor cannot be combined with an optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config: dict[str, JSON] = inner.get_config()
    plain = {name: value for name, value in config.items() if isinstance(value, int | float | str)}
    compressor.check(type(inner).__name__.lower(), plain)


def distributed_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers of a model that exchange gradients."""
    return [optimizer for optimizer in optimizers(model) if hasattr(optimizer, "exchange")]
