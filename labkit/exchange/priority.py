"""Priority for front layers: the next forward pass starts as soon as the first layer is updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.exchange.exchange import Exchange
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, hooks_of

MEASURED_STEPS = 5


class PriorityTraining(keras.callbacks.Callback, Hook):
    """A training step whose exchange overlaps with the forward pass of the next step.

        step k     ... backward: gradients are issued, last layer first
        step k+1   layer 1: wait for its mean, update, forward; layer 2: wait, update, forward; ...

    Each layer is updated before its next use. The update uses the learning rate of the step that
    computed the gradient. The trained weights equal those of ordinary training steps, because no
    layer is used before its update. At the end of an epoch, pending updates are applied before
    validation. Large gradients are split into several buckets. Among the ready buckets, the
    communication thread first exchanges those of front layers.

    Args:
        model: The `keras.Sequential` to train.
        optimizer: A function that returns a new optimizer, because each layer gets a separate one.
        exchange: An exchange with the schedule "priority".

    Attributes:
        variables: For each layer, its trainable variables.
        optimizers: For each layer, its optimizer.

    Raises:
        InvalidInput: The model is not a `keras.Sequential`, or the loss is scaled. `InvalidInput`
            is also raised if the optimizer needs all gradients at once (global_clipnorm).
    """

    name: ClassVar[str] = "priority"

    def __init__(
        self,
        model: keras.Model,
        optimizer: Callable[[], keras.optimizers.Optimizer],
        exchange: Exchange,
    ) -> None:
        super().__init__()
        validate_model(model, optimizer())
        self._exchange = exchange
        self._layers = list(model.layers)
        self.variables = [list(layer.trainable_variables) for layer in self._layers]
        self.optimizers = [optimizer() for _ in self._layers]
        for layer_optimizer, variables in zip(self.optimizers, self.variables, strict=True):
            layer_optimizer.build(variables)
        self._pending = tf.Variable(False, trainable=False)
        # The variable `_rate` stores the learning rate of the training step whose weight updates
        # are pending.
        self._rate = tf.Variable(keras.ops.copy(model.optimizer.learning_rate), trainable=False)
        flat = [variable for variables in self.variables for variable in variables]
        layers = [n for n, variables in enumerate(self.variables) for _ in variables]
        exchange.prepare([v.value for v in flat], [v.path for v in flat], layers)
        exchange.service.reorder_after(MEASURED_STEPS, exchange.by_priority)

    def set_model(self, model: keras.Model) -> None:
        """Replace the model's training step by a step that exchanges front layers first."""
        super().set_model(model)
        hooks_of(model).add_hook(self)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the model's original training step."""
        hooks_of(self.model).remove_hooks(self.name)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Apply the pending weight updates of the epoch's last step."""
        self.update_all()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Apply pending weight updates, so that validation uses the weights after the last step."""
        self.update_all()

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Run a step that exchanges front layers first, in place of the model's own step."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            value = x
            for number, layer in enumerate(self._layers):
                # Layers are updated one after another, because each wait for a mean blocks one of
                # TensorFlow's threads.
                with tape.stop_recording(), tf.control_dependencies([value]):
                    self._update(number)
                training = {"training": True} if layer._call_has_training_arg else {}
                value = layer(value, **training)
            self._pending.assign(False)
            loss = self.model.compute_loss(x, y, value, sample_weight, training=True)
        trained = [variable for variables in self.variables for variable in variables]
        gradients = tape.gradient(loss, [variable.value for variable in trained])
        for variable, gradient in zip(trained, gradients, strict=True):
            if gradient is None:
                raise InvalidInput(
                    "schedule='priority' needs a gradient of every trainable variable, but "
                    f"{variable.path} has no gradient; freeze the layer of this variable, or use "
                    "schedule='overlap'"
                )
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        # The variable `count` is the number of samples in the batch, before hooks changed the
        # batch.
        count = tf.cast(rows, tf.int64)
        self.model._loss_tracker.update_state(loss, sample_weight=count)
        # A training step waits for all mean gradients of the previous step. After the wait, the
        # training step issues its own gradients. The control dependency is explicit, because some
        # gradients do not depend on the weights of their layer.
        with tf.control_dependencies([value]):
            issued = self._exchange.issue(gradients, count)
        with tf.control_dependencies(issued):
            self._pending.assign(True)
            self._rate.assign(self.model.optimizer.learning_rate)
        logs: Logs = self.model.compute_metrics(x, y, value, sample_weight=sample_weight)
        return logs

    def update_all(self) -> None:
        """Apply all pending weight updates of the last step now."""
        for number in range(len(self._layers)):
            self._update(number)
        self._pending.assign(False)

    def _update(self, number: int) -> None:
        """If updates are pending, wait for the mean gradients of one layer, and apply them."""
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
                # Callbacks change the learning rate of the model's optimizer, but not of the
                # layers' optimizers.
                optimizer.learning_rate = self._rate
            optimizer.apply(means, variables)
            return tf.constant(True)

        tf.cond(self._pending, apply, lambda: tf.constant(False))


def validate_model(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Raise InvalidInput if the optimizer cannot update the model layer by layer."""
    if not isinstance(model, keras.Sequential):
        raise InvalidInput(
            f"schedule='priority' updates layer by layer and requires a keras.Sequential, not a "
            f"{type(model).__name__}; use schedule='overlap'"
        )
    if getattr(optimizer, "global_clipnorm", None):
        raise InvalidInput(
            "schedule='priority' cannot clip gradients by their global norm; use schedule='overlap'"
        )
    if keras.config.dtype_policy().name == "mixed_float16":
        raise InvalidInput(
            "schedule='priority' does not scale the loss, which mixed_float16 requires; use "
            "schedule='overlap'"
        )
