"""LARS, an optimizer whose learning rate per layer depends on norms of weights and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import keras
import tensorflow as tf
from keras import ops

from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


TRUST_RATIOS = ("paper", "optax")


@keras.saving.register_keras_serializable(package="labkit")
class LARS(keras.optimizers.Optimizer):
    r"""LARS: stochastic gradient descent with momentum and a learning rate per layer.

    The weights w have the gradient g. Equation 6 of the paper defines their trust ratio as
    \(\lambda = \tau \lVert w \rVert / (\lVert g \rVert + \beta \lVert w \rVert)\). The library
    optax defines the trust ratio as \(\lambda = \tau \lVert w \rVert / \lVert g + \beta w \rVert\).
    A variable w of any shape has the gradient g and the velocity v. A step is \(v \leftarrow m v +
    \eta \lambda (g + \beta w)\), \(w \leftarrow w - v\). If λ is 0 or 0 / 0, the optimizer uses λ =
    1. With λ = 0, weights that are all zero would never change.

    Args:
        learning_rate: Global learning rate η, a number or a Keras schedule.
        momentum: Momentum m, from 0 to below 1.
        trust_coefficient: Factor τ in the trust ratio λ; above 0.
        exclude_1d: Whether biases and normalization parameters are updated by plain momentum SGD (λ
            = 1, β = 0).
        weight_decay: Weight decay β, which is part of the trust ratio; None means 0.
            The method `exclude_from_weight_decay` excludes further variables.
        trust_ratio: "paper" adds the norms of gradient and decay; "optax" uses the norm of their
            sum.
        options: Arguments of every Keras optimizer, such as `clipnorm`.

    Raises:
        InvalidInput: The momentum, the trust coefficient or the trust ratio has an invalid value.

    Reference: Y. You, I. Gitman, B. Ginsburg: Large batch training of convolutional networks, 2017,
    arXiv 1708.03888. In contrast to the paper, one-dimensional variables are updated by plain
    momentum SGD by default.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 1.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        exclude_1d: bool = True,
        weight_decay: float | None = None,
        trust_ratio: Literal["paper", "optax"] = "paper",
        **options: JSON,
    ) -> None:
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **options)
        if not 0 <= momentum < 1 or trust_coefficient <= 0:
            raise InvalidInput(
                f"momentum={momentum}, trust_coefficient={trust_coefficient}: give a momentum from "
                "0 to below 1, and a trust coefficient above 0"
            )
        if trust_ratio not in TRUST_RATIOS:
            raise InvalidInput(f"trust_ratio={trust_ratio!r}: give {' or '.join(TRUST_RATIOS)}")
        self.momentum, self.trust_coefficient = momentum, trust_coefficient
        self.exclude_1d, self.trust_ratio = exclude_1d, trust_ratio

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create a velocity for each variable, with the shape of the variable."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(
        self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor
    ) -> None:
        """Apply one step of LARS to one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(
            tf.convert_to_tensor(gradient), variable.dtype
        )  # The function `convert_to_tensor` makes a sparse gradient (IndexedSlices) dense.
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
        if self.trust_ratio == "optax":
            norm = ops.norm(ops.reshape(gradient + decay * variable, [-1]))
        else:
            norm = ops.norm(ops.reshape(gradient, [-1])) + decay * weights
        is_defined = ops.logical_and(weights > 0, norm > 0)
        return ops.where(
            is_defined, self.trust_coefficient * weights / ops.where(is_defined, norm, 1), 1
        )

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Do nothing, because `update_step` includes the weight decay in the gradient."""

    def get_config(self) -> dict[str, JSON]:
        """Return all arguments of the constructor."""
        names = ("momentum", "trust_coefficient", "exclude_1d", "trust_ratio")
        config: dict[str, JSON] = super().get_config() | {
            name: getattr(self, name) for name in names
        }
        return config
