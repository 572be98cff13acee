"""One stage on its rank: forward and backward of a micro-batch, and what is kept between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from labkit.stages.ledger import Ledger

Loss = Callable[[Any, Any, Any], Any]


class Stage:
    r"""A part of a model with the activations of the micro-batches that are under way.

    The objective of the stage is \(\langle y, \bar y \rangle\) with the gradient \(\bar y\) that
    the next stage returns, or the loss at the end; layers' own losses are added. Gradients of
    micro-batches add up. What a backward pass needs is kept as it was in the forward pass, the
    weights included, so that weights may change between both.

    Args:
        model: a part of the whole model, see `Chain.part`.
        loss: of (targets, predictions, sample weights) at the last stage; None elsewhere.
        first: whether nobody asks for the gradient with respect to the input.
        recompute: keep only the input, and go forward a second time before going back.
    """

    def __init__(
        self, model: Any, loss: Loss | None = None, first: bool = False, recompute: bool = False
    ) -> None:
        self.model, self._loss, self._first, self._recompute = model, loss, first, recompute
        self.variables = list(model.trainable_variables)
        own = {id(variable) for variable in self.variables}
        # Of dropout and normalisation: a second forward pass begins with it as the first one did.
        self._state = [v for v in model.variables if recompute and id(v) not in own]
        self._kept: dict[int, tuple[Any, ...]] = {}
        self._waiting: dict[int, tuple[Any, ...]] = {}  # for their weight gradients
        self._gradients: list[Any] | None = None
        self._call = tf.function(self._forward, reduce_retracing=True)  # rows differ
        self.most_kept = 0  # micro-batches at a time
        self.ledger = Ledger()

    def forward(self, number: int, x: Any, share: float, targets: Any = None) -> Any:
        """The output of a micro-batch; at the last stage its part of the loss, a scalar.

        Args:
            number: of the micro-batch.
            x: its input.
            share: of its rows in the batch, by which losses count.
            targets: (y, sample weights) at the last stage.
        """
        state = [tf.identity(variable.value) for variable in self._state]
        with self.ledger.look() as made:
            tape, y, objective = self._record(x, share, targets)
        if self._recompute:
            self._kept[number] = (None, x, None, None, share, targets, state)
            made = state
        else:
            self._kept[number] = (tape, x, y, objective, share, targets, state)
        self.ledger.keep(self, number, [x, *made], self.model.variables)
        self.most_kept = max(self.most_kept, len(self._kept))
        return objective if self._loss is not None else y

    def backward(self, number: int, gradient: Any, weights_later: bool = False) -> Any:
        """The gradient with respect to the input; None at the first stage.

        Args:
            number: of the micro-batch.
            gradient: with respect to the output; None at the last stage.
            weights_later: leave the gradients of the weights to `backward_weight`.
        """
        tape, x, y, objective, share, targets, state = self._kept.pop(number)
        if tape is None:
            with self.ledger.look() as made:
                tape, y, objective = self._again(x, share, targets, state)
            self.ledger.keep(self, number, [x, *state, *made], self.model.variables)
        ends = [objective] if gradient is None else [y, objective]
        one = tf.ones_like(objective)
        seeds = [one] if gradient is None else [gradient, one]
        inputs = [] if self._first else [x]
        values = [] if weights_later else [variable.value for variable in self.variables]
        found = tape.gradient(ends, [*inputs, *values], seeds)
        if weights_later:
            self._waiting[number] = (tape, ends, seeds)
        else:
            self._add(found[len(inputs) :])
            self.ledger.drop(self, number)
        if not inputs:
            return None
        return tf.zeros_like(x) if found[0] is None else tf.convert_to_tensor(found[0])

    def backward_weight(self, number: int) -> None:
        """Add the gradients of the weights of a micro-batch whose `backward` left them."""
        tape, ends, seeds = self._waiting.pop(number)
        self._add(tape.gradient(ends, [variable.value for variable in self.variables], seeds))
        self.ledger.drop(self, number)

    def take_gradients(self) -> list[Any]:
        """The sum over the micro-batches since the last call, one tensor a variable."""
        found, self._gradients = self._gradients, None
        if found is None:
            return [tf.zeros_like(variable.value) for variable in self.variables]
        return found

    def _record(self, x: Any, share: float, targets: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape(persistent=True) as tape:
            if not self._first:
                tape.watch(x)
            y, own = self._call(x)
            weight = tf.constant(share, own.dtype)
            objective = own * weight
            if self._loss is not None:
                loss = self._loss(targets[0], y, targets[1])
                objective += tf.cast(loss, own.dtype) * weight
        return tape, y, objective

    def _again(self, x: Any, share: float, targets: Any, state: list[Any]) -> Any:
        """The forward pass of then, which leaves no trace but the tape."""
        now = [tf.identity(variable.value) for variable in self._state]
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)
        found = self._record(x, share, targets)
        for variable, value in zip(self._state, now, strict=True):
            variable.assign(value)
        return found

    def _forward(self, x: Any) -> tuple[Any, Any]:
        y = self.model(x, training=True)
        own = [tf.cast(loss, keras.config.floatx()) for loss in self.model.losses]
        return y, tf.add_n(own) if own else tf.zeros((), keras.config.floatx())

    def _add(self, found: list[Any]) -> None:
        dense = [
            tf.zeros_like(variable.value) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(found, self.variables, strict=True)
        ]
        if self._gradients is None:
            self._gradients = dense
        else:
            self._gradients = [a + b for a, b in zip(self._gradients, dense, strict=True)]
        self.ledger.gather(self, self._gradients)
