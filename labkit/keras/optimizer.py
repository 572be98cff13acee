"""An optimizer of Keras's own kind that applies the mean gradient of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias, TypedDict, Unpack

import keras
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.compression import Compressor
from labkit.exchange import SCHEDULES, Exchange, Guard, weighed
from labkit.exchange.hooks import Rows, Variables, optimizers

Pairs: TypeAlias = "list[tuple[tf.Tensor | None, tf.Variable]]"


class ExchangeOptions(TypedDict, total=False):
    """What may be said of the exchange, see `Exchange`."""

    algorithm: str
    schedule: str
    bucket_bytes: int
    compressor: Compressor | Mapping[str, JSON] | str | None
    seed: int
    guard: Guard | None


def DistributedOptimizer(  # noqa: N802 - named as the class that it stands for
    optimizer: keras.optimizers.Optimizer | str,
    communicator: Communicator,
    **exchange: Unpack[ExchangeOptions],
) -> keras.optimizers.Optimizer:
    """An optimizer of the same kind that applies the mean gradient of all ranks.

    It stands outside Keras's loss scaling: the scaled gradients are averaged first, so an
    overflow on one rank is an overflow on all, and all skip the step together; one process may
    overflow in another step. It is saved as the plain optimizer, so a saved model opens without
    labkit.

    With `gradient_accumulation_steps` gradients are added up on each rank and travel with every
    k-th step only; in the others, ranks tell each other their rows. (Scaled losses travel with
    every step: all ranks must see the same overflow.) Gradients of a large embedding travel and
    are applied as rows, each once: a row that several words share counts as one, as in a dense
    gradient.

    `fit` switches XLA off for it and counts each rank by its rows; for `train_on_batch` call
    `attach(model)` after `compile`, which does the same. In a loop of your own set `rows` of the
    optimizer before `apply`, inside the traced step; without it every rank counts the same.

    Args:
        optimizer: a Keras optimizer, or the name of one.
        communicator: the ranks.
        exchange: algorithm, schedule, bucket_bytes, compressor, seed and guard; see `Exchange`.

    Raises:
        InvalidInput: a schedule that is impossible here; a compressor that the optimizer does not
            go with.
    """
    schedule = SCHEDULES.get(exchange.get("schedule", ""))
    if schedule is not None and schedule.into_next:
        raise InvalidInput(
            f"schedule={schedule.name!r} reaches over two steps and cannot live in an optimizer; "
            f"use lk.AllReduce(schedule={schedule.name!r}) in an experiment, or 'overlap' here"
        )
    plain = keras.optimizers.get(optimizer)
    guard = exchange.get("guard")
    if guard is not None and guard.policy == "skip" and plain.gradient_accumulation_steps:
        raise InvalidInput(
            "a step cannot be skipped of gradients that are added up over several "
            "(gradient_accumulation_steps); use bad_numbers='stop' or 'clip'"
        )
    scaled = isinstance(plain, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scaled:
        # compile() would wrap us, and a wrapped optimizer is not called when a rank overflows.
        plain = keras.optimizers.LossScaleOptimizer(plain)
    kind = type(plain)

    # By the name under which it is saved: of a class of our own that is more than the class's.
    name = keras.saving.get_registered_name(kind)
    distributed = copy_of(plain, type(name, (kind,), _members(kind)))
    distributed.exchange = Exchange(communicator, **exchange)
    if distributed.exchange.compressor is not None:
        check_compressor(distributed.exchange.compressor, plain)
    if plain.built:
        distributed.build(plain._trainable_variables)
        for own, given in zip(distributed.variables, plain.variables, strict=True):
            own.assign(given)
    return distributed


def _members(
    kind: type[keras.optimizers.Optimizer],
) -> dict[str, Callable[..., object] | str | None]:
    """What a distributed optimizer has of its own."""

    def apply(
        self: keras.optimizers.Optimizer,
        grads: list[tf.Tensor],
        trainable_variables: Variables = None,
        rows: Rows = None,
    ) -> tf.Tensor:
        variables = trainable_variables or self._trainable_variables
        names = [variable.path for variable in variables]
        scale = getattr(self, "dynamic_scale", None)
        counted = self.rows if rows is None else rows
        _shape(grads, variables)
        if self.gradient_accumulation_steps:
            given = weighed(self.exchange.communicator, grads, counted)
        else:
            given = self.exchange.mean(list(grads), counted, names, scale)
        if self.loss_scale_factor is not None:  # by which Keras divides no slices
            given = [each if each is None else tf.convert_to_tensor(each) for each in given]
        if not self.exchange.may_skip:
            # Where ranks may die, a step is taken as a whole, also the count of steps, or not.
            whole = given if self.exchange.communicator.outlives else []
            with tf.control_dependencies([each for each in whole if each is not None]):
                return kind.apply(self, given, trainable_variables)
        if not self.built:
            with tf.init_scope():
                self.build(variables)

        def take() -> tf.Tensor:
            kind.apply(self, given, trainable_variables)
            return tf.constant(True)

        return tf.cond(self.exchange.all_finite(given), take, lambda: tf.constant(False))

    def clip(self: keras.optimizers.Optimizer, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        """What comes here has been added up, in the branch of every k-th step."""
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


def _shape(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
    """Tell tensors their shapes, which masks and loops may have lost."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)


def check_compressor(compressor: Compressor, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse a compressor that contradicts an optimizer, wherever that one comes from."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config: dict[str, JSON] = inner.get_config()
    plain = {name: value for name, value in config.items() if isinstance(value, int | float | str)}
    compressor.check(type(inner).__name__.lower(), plain)


def copy_of(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.optimizers.Optimizer] | None = None
) -> keras.optimizers.Optimizer:
    """A new optimizer of the same settings, without state; of another class where one is given."""
    recipe = Recipe.of(optimizer)
    return recipe._replace(kind=kind or recipe.kind).made()


class Recipe(NamedTuple):
    """What makes an optimizer, also in another process.

    Attributes:
        kind: its class.
        own: classes by name that its settings may name, which need not be registered with Keras.
        settings: as `get_config` says them.
    """

    kind: type[keras.optimizers.Optimizer]
    own: dict[str, type]
    settings: dict[str, JSON]

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> Recipe:
        """That of an optimizer."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        # Of the user's own, such as a schedule.
        own = {known.__name__: known for known in (type(inner), type(inner._learning_rate))}
        return cls(type(optimizer), own, optimizer.get_config())

    def made(self) -> keras.optimizers.Optimizer:
        """A new one, without state."""
        with keras.saving.custom_object_scope(self.own):
            return by_itself(self.kind.from_config(self.settings))


def by_itself(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The same one, which sums gradients over replicas of TensorFlow's own only where there are.

    The sum that Keras asks for has a custom gradient, and TensorFlow keeps what makes such a one,
    and with it the graph, the model and its slots, until the process ends.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    sums = inner._all_reduce_sum_gradients

    def summed(pairs: Pairs) -> Pairs:
        return sums(pairs) if tf.distribute.has_strategy() else pairs

    inner._all_reduce_sum_gradients = summed
    return optimizer


def distributed_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The distributed optimizers that a model has."""
    return [each for each in optimizers(model) if hasattr(each, "exchange")]
