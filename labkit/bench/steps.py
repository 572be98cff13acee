"""Training steps to measure: small models with plain variables, so that a framework's own costs
do not hide those of the exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

# What stands between gradients and update: of this rank's gradients, the mean over the ranks.
Averaging: TypeAlias = "Callable[[list[tf.Tensor]], list[tf.Tensor]]"
RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Case:
    """A model and a batch: hidden widths of an MLP on 784 inputs, or the small CNN (none)."""

    name: str
    widths: tuple[int, ...]
    batch: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the weights, each followed by its bias."""
        if not self.widths:
            return [(3, 3, 1, 32), (3, 3, 32, 64), (9216, 128), (128, 10)]
        sizes = (784, *self.widths, 10)
        return list(pairwise(sizes))

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return sum(int(np.prod(shape)) + shape[-1] for shape in self.shapes)

    def arrays(self) -> list[np.ndarray]:
        """Weights and biases at the start, dense (in, out), convolutions (y, x, in, out)."""
        # By NumPy: every framework starts from the same weights.
        rng = np.random.default_rng(7)
        found: list[np.ndarray] = []
        for shape in self.shapes:
            # He's scale, so that activations neither vanish nor overflow while steps are timed.
            scale = np.float32(np.sqrt(2 / np.prod(shape[:-1])))
            found += [rng.standard_normal(shape, np.float32) * scale]
            found += [np.zeros(shape[-1], np.float32)]
        return found

    def data(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """A rank's batch: x (batch, 784) and classes y (batch,)."""
        own = np.random.default_rng(1000 + rank)
        x = own.standard_normal((self.batch, 784), np.float32)
        return x, own.integers(0, 10, self.batch)


CASES = {
    case.name: case
    for case in (
        Case("mlp-1024", (1024, 1024), 32),
        Case("mlp-2048", (2048, 2048), 64),
        Case("cnn", (), 64),
        Case("deep-mlp", (1024,) * 8, 256),
    )
}


@dataclass(frozen=True)
class WordCase:
    """An embedding of many words before a small layer, and a batch of words."""

    name: str
    words: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return (self.words + 10) * self.width

    def arrays(self) -> list[np.ndarray]:
        """The table (words, width) and the layer (width, 10) at the start."""
        rng = np.random.default_rng(7)
        return [
            rng.standard_normal(shape, np.float32)
            for shape in ((self.words, self.width), (self.width, 10))
        ]

    def data(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """A rank's batch: words x and classes y, both (batch,)."""
        own = np.random.default_rng(1000 + rank)
        return own.integers(0, self.words, self.batch), own.integers(0, 10, self.batch)


WORD_CASES = {case.name: case for case in (WordCase("embedding", 100_000, 64, 2_000),)}


class Model:
    """The model of a case, its data on one rank, and SGD with momentum.

    Args:
        case: what to build; weights are the same on every rank.
        rank: whose data.
    """

    def __init__(self, case: Case | WordCase, rank: int) -> None:
        import tensorflow as tf

        x, y = case.data(rank)
        self.weights = [tf.Variable(array) for array in case.arrays()]
        self.momenta = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.x, self.y = tf.constant(x), tf.constant(y.astype(np.int32))

    def loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Mean cross-entropy of the batch."""
        import tensorflow as tf

        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=self.scores(x))
        )

    def scores(self, x: tf.Tensor) -> tf.Tensor:
        """Of each class, (batch, 10)."""
        return self._convolutions(x) if len(self.weights[0].shape) == 4 else self._perceptron(x)

    def step(self, mean: Averaging) -> Callable[[], np.ndarray]:
        """A compiled training step; `mean` stands between gradients and update."""
        import tensorflow as tf

        step = tf.function(lambda x, y: self.train(x, y, mean), jit_compile=False)
        return lambda: step(self.x, self.y).numpy()

    def train(self, x: tf.Tensor, y: tf.Tensor, mean: Averaging) -> tf.Tensor:
        """The operations of one step; its loss."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        self.update(mean(tape.gradient(loss, self.weights)))
        return loss

    def update(self, gradients: list[tf.Tensor]) -> None:
        """Change the weights."""
        import tensorflow as tf

        for weight, momentum, gradient in zip(self.weights, self.momenta, gradients, strict=True):
            # The operation of Keras's own optimizer, without the Python around it.
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle, accum=momentum.handle, lr=RATE, grad=gradient, momentum=MOMENTUM
            )

    def checksum(self) -> float:
        """Equal where all weights are."""
        # In float64, and of magnitudes, which cannot cancel each other.
        return float(sum(np.abs(w.numpy().astype(np.float64)).sum() for w in self.weights))

    def _perceptron(self, x: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        *hidden, last = zip(self.weights[::2], self.weights[1::2], strict=True)
        for weight, bias in hidden:
            x = tf.nn.relu(tf.nn.bias_add(x @ weight, bias))
        return tf.nn.bias_add(x @ last[0], last[1])

    def _convolutions(self, x: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        w = self.weights
        x = tf.reshape(x, (-1, 28, 28, 1))
        x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w[0], 1, "VALID"), w[1]))
        x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w[2], 1, "VALID"), w[3]))
        x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), (-1, 9216))
        x = tf.nn.relu(tf.nn.bias_add(x @ w[4], w[5]))
        return tf.nn.bias_add(x @ w[6], w[7])


class WordModel(Model):
    """The model of words, and plain SGD: of a table, it changes the rows of the batch alone."""

    def scores(self, x: tf.Tensor) -> tf.Tensor:
        """See `Model`."""
        import tensorflow as tf

        table, layer = self.weights
        return tf.gather(table, x) @ layer

    def update(self, gradients: list[tf.Tensor]) -> None:
        """See `Model`."""
        import tensorflow as tf

        for weight, gradient in zip(self.weights, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                rows = tf.IndexedSlices(RATE * gradient.values, gradient.indices)
                weight.scatter_sub(rows)
            else:
                weight.assign_sub(RATE * gradient)
