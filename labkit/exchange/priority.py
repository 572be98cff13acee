"""Front layers first: the next forward pass starts as soon as its first layer is up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.exchange.exchange import Exchange
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, seam

LEARN = 5  # steps after which the order of the buckets is fixed, from the times measured so far


class PriorityTraining(keras.callbacks.Callback, Hook):
    """A training step whose end overlaps with the next one's begin.

        step k     ... backward: gradients are issued, last layer first
        step k+1   layer 1: wait for its mean, update, forward; layer 2: wait, update, forward; ...

    Each layer is updated right before it is used again, at the rate of its own step, so the result
    is that of the ordinary step. What is left is applied at the end of an epoch, before validation.
    Large gradients are cut, and the communication thread serves front layers before what else is
    ready.

    Args:
        model: a `keras.Sequential`; each layer has an optimizer of its own, of the same kind.
        optimizer: returns a new optimizer.
        exchange: with schedule "priority".

    Attributes:
        variables: of each layer, those that are trained.
        optimizers: the layers' own.

    Raises:
        InvalidInput: the model is no chain of layers, or its optimizer looks at all gradients at
            once (global_clipnorm), or scales the loss.
    """

    name: ClassVar[str] = "priority"

    def __init__(
        self,
        model: keras.Model,
        optimizer: Callable[[], keras.optimizers.Optimizer],
        exchange: Exchange,
    ) -> None:
        super().__init__()
        check(model, optimizer())
        self._exchange = exchange
        self._layers = list(model.layers)
        self.variables = [list(layer.trainable_variables) for layer in self._layers]
        self.optimizers = [optimizer() for _ in self._layers]
        for own, variables in zip(self.optimizers, self.variables, strict=True):
            own.build(variables)
        self._pending = tf.Variable(False, trainable=False)
        # Of the step that is pending.
        self._rate = tf.Variable(keras.ops.copy(model.optimizer.learning_rate), trainable=False)
        flat = [variable for variables in self.variables for variable in variables]
        layers = [n for n, variables in enumerate(self.variables) for _ in variables]
        exchange.prepare([v.value for v in flat], [v.path for v in flat], layers)
        exchange.service.reorder_after(LEARN, exchange.by_priority)

    def set_model(self, model: keras.Model) -> None:
        """Put the step in the place of the model's own."""
        super().set_model(model)
        seam(model).put_on(self)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Leave the model its own step."""
        seam(self.model).take_off(self.name)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Apply what is left."""
        self.update_all()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Apply what is left, so that validation sees the weights of the last step."""
        self.update_all()

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """The step of the schedule, instead of the model's own."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            value = x
            for number, layer in enumerate(self._layers):
                # In the order of the layers: a wait stands still in a thread of TensorFlow's.
                with tape.stop_recording(), tf.control_dependencies([value]):
                    self._update(number)
                training = {"training": True} if layer._call_has_training_arg else {}
                value = layer(value, **training)
            self._pending.assign(False)
            loss = self.model.compute_loss(x, y, value, sample_weight, training=True)
        found = [variable for variables in self.variables for variable in variables]
        gradients = tape.gradient(loss, [variable.value for variable in found])
        for variable, gradient in zip(found, gradients, strict=True):
            if gradient is None:
                raise InvalidInput(
                    f"schedule='priority' wants a gradient of every trainable variable, and "
                    f"{variable.path} has none; freeze its layer, or use schedule='overlap'"
                )
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        count = tf.cast(rows, tf.int64)  # of the data, before any stand-in
        self.model._loss_tracker.update_state(loss, sample_weight=count)
        # A gradient need not depend on the weights of its layer: a step issues after its last wait.
        with tf.control_dependencies([value]):
            issued = self._exchange.issue(gradients, count)
        with tf.control_dependencies(issued):
            self._pending.assign(True)
            self._rate.assign(self.model.optimizer.learning_rate)
        logs: Logs = self.model.compute_metrics(x, y, value, sample_weight=sample_weight)
        return logs

    def update_all(self) -> None:
        """Apply what is left of a step, now."""
        for number in range(len(self._layers)):
            self._update(number)
        self._pending.assign(False)

    def _update(self, number: int) -> None:
        """Wait for a layer's means and apply them, if a step has issued them."""
        variables = self.variables[number]
        if not variables:
            return
        start = sum(len(others) for others in self.variables[:number])

        def apply() -> tf.Tensor:
            means = self._exchange.wait(range(start, start + len(variables)))
            optimizer = self.optimizers[number]
            if not isinstance(
                optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
            ):
                optimizer.learning_rate = self._rate  # callbacks set that of the model's optimizer
            optimizer.apply(means, variables)
            return tf.constant(True)

        tf.cond(self._pending, apply, lambda: tf.constant(False))


def check(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse what cannot be updated layer by layer."""
    if not isinstance(model, keras.Sequential):
        raise InvalidInput(
            f"schedule='priority' updates layer by layer and wants a keras.Sequential, not a "
            f"{type(model).__name__}; use schedule='overlap'"
        )
    if getattr(optimizer, "global_clipnorm", None):
        raise InvalidInput("schedule='priority' cannot clip by global norm; use 'overlap'")
    if keras.config.dtype_policy().name == "mixed_float16":
        raise InvalidInput("schedule='priority' does not scale the loss; use 'overlap'")
