"""A training step split over two devices, and one whose updates wait for all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.bench.steps import Case, Model

if TYPE_CHECKING:
    import tensorflow as tf

FRONT, BACK = "CPU:0", "CPU:1"  # logical devices of one process


class SplitModel(Model):
    """A perceptron whose first half of layers, its rows included, is on one device, the rest on
    another.

    Gradients are computed where their layer is; what passes between the devices is TensorFlow's
    doing.
    """

    def __init__(self, case: Case, rank: int) -> None:
        import tensorflow as tf

        super().__init__(case, rank)
        self.cut = len(self.weights) // 4 * 2  # whole layers: a weight and its bias
        places = [FRONT] * self.cut + [BACK] * (len(self.weights) - self.cut)
        self.weights = [_on(place, each) for place, each in zip(places, self.weights, strict=True)]
        zeros = [tf.zeros_like(each) for each in self.weights]
        self.momenta = [_on(place, each) for place, each in zip(places, zeros, strict=True)]

    def train(self, x: tf.Tensor, y: tf.Tensor, mean: object = None) -> tf.Tensor:
        """See `Model`; there is no mean, for there is one process."""
        import tensorflow as tf

        front, back = self.weights[: self.cut], self.weights[self.cut :]
        with tf.device(FRONT), tf.GradientTape() as before:
            passed = tf.nn.relu(_layers(x, front))
        with tf.device(BACK):
            with tf.GradientTape() as behind:
                behind.watch(passed)
                scores = _layers(passed, back)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
                loss = tf.reduce_mean(losses)
            *own, returned = behind.gradient(loss, [*back, passed])
        with tf.device(FRONT):
            first = before.gradient(passed, front, output_gradients=returned)
        # Without a device: an update is where its variable is.
        self.update([*first, *own])
        return loss


def gated(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """The same gradients, none of which is there before all of them are.

    That is what `gate_gradients=GATE_GRAPH` meant to the optimizers of TensorFlow 1.
    """
    import tensorflow as tf

    with tf.control_dependencies(gradients):
        return [tf.identity(each) for each in gradients]


def _layers(x: tf.Tensor, weights: Sequence[tf.Variable]) -> tf.Tensor:
    """Dense layers with a rectifier between each two."""
    import tensorflow as tf

    for place, (weight, bias) in enumerate(_pairs(weights)):
        x = tf.nn.bias_add((tf.nn.relu(x) if place else x) @ weight, bias)
    return x


def _pairs(weights: Sequence[tf.Variable]) -> list[tuple[tf.Variable, tf.Variable]]:
    return list(zip(weights[::2], weights[1::2], strict=True))


def _on(place: str, value: tf.Tensor) -> tf.Variable:
    import tensorflow as tf

    with tf.device(place):
        return tf.Variable(value)
