"""LARS: each layer's rate by the size of its weights beside that of its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf
from keras import ops

from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


@keras.saving.register_keras_serializable(package="labkit")
class LARS(keras.optimizers.Optimizer):
    r"""Stochastic gradient descent with momentum, at a rate of each layer's own.

    \(\lambda = \tau \lVert w \rVert / (\lVert g \rVert + \beta \lVert w \rVert)\),
    \(v \leftarrow m v + \eta \lambda (g + \beta w)\), \(w \leftarrow w - v\), for a variable w
    of any shape with its gradient g. Where λ would be 0, or 0 / 0, it is 1: weights that are all
    zero could never leave it.

    Args:
        learning_rate: η, a number or a schedule of Keras.
        momentum: m, from 0 to below 1.
        trust_coefficient: τ, above 0, by how much a layer trusts its gradient.
        exclude_1d: biases and what normalises take plain steps, with λ = 1 and β = 0.
        weight_decay: β, inside the trust ratio; None: 0. `exclude_from_weight_decay` excludes more.
        options: what all optimizers of Keras take, such as `clipnorm`.

    Raises:
        InvalidInput: a momentum or a trust coefficient that is none.

    Source: Y. You, I. Gitman, B. Ginsburg: Large batch training of convolutional networks, 2017,
    arXiv 1708.03888. Differs from it: one-dimensional variables are excluded, as has become usual.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        exclude_1d: bool = True,
        weight_decay: float | None = None,
        **options: JSON,
    ) -> None:
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **options)
        if not 0 <= momentum < 1 or trust_coefficient <= 0:
            raise InvalidInput(
                f"momentum={momentum}, trust_coefficient={trust_coefficient}: give a momentum from "
                "0 to below 1, and a trust coefficient above 0"
            )
        self.momentum, self.trust_coefficient = momentum, trust_coefficient
        self.exclude_1d = exclude_1d

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make what is kept of past gradients: one velocity a variable, of its shape."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """One step of one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(tf.convert_to_tensor(gradient), variable.dtype)  # of rows, made dense
        if not (self.exclude_1d and len(variable.shape) <= 1):
            decay = self.weight_decay or 0.0
            decay *= self._use_weight_decay(variable)
            rate *= self._trust(gradient, variable, decay)
            gradient += decay * variable
        velocity = self._velocities[self._get_variable_index(variable)]
        self.assign(velocity, self.momentum * velocity + rate * gradient)
        self.assign_sub(variable, velocity)

    def _trust(self, gradient: tf.Tensor, variable: tf.Variable, decay: float) -> tf.Tensor:
        weights = ops.norm(ops.reshape(variable, [-1]))
        whole = ops.norm(ops.reshape(gradient, [-1])) + decay * weights
        known = ops.logical_and(weights > 0, whole > 0)
        return ops.where(known, self.trust_coefficient * weights / ops.where(known, whole, 1), 1)

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Keras would take it off the weights, beside the gradient: here it is a part of it."""

    def get_config(self) -> dict[str, JSON]:
        """All arguments."""
        own = ("momentum", "trust_coefficient", "exclude_1d")
        config: dict[str, JSON] = super().get_config() | {name: getattr(self, name) for name in own}
        return config
