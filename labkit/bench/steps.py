"""Training steps for benchmarks.

The benchmark models are small and use plain variables. A framework's overhead would otherwise hide
the cost of the gradient exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import tensorflow as tf

    from labkit.exchange import Exchange

# A function of type `Averaging` receives this rank's gradients, and returns their averages over all
# ranks.
Averaging: TypeAlias = "Callable[[list[tf.Tensor]], list[tf.Tensor]]"
RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class ModelCase:
    """A model and a batch size: an MLP, or a CNN for empty `widths`."""

    name: str
    widths: tuple[int, ...]
    batch: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the weights without the biases; each weight also has a bias."""
        if not self.widths:
            return [(3, 3, 1, 32), (3, 3, 32, 64), (9216, 128), (128, 10)]
        sizes = (784, *self.widths, 10)
        return list(pairwise(sizes))

    @property
    def parameters(self) -> int:
        """Total number of elements of the weights and biases."""
        return sum(int(np.prod(shape)) + shape[-1] for shape in self.shapes)

    def arrays(self) -> list[np.ndarray]:
        """Return initial weights and biases: dense (in, out), convolution (y, x, in, out)."""
        # NumPy creates the weights, so that all frameworks start from equal weights.
        rng = np.random.default_rng(7)
        found: list[np.ndarray] = []
        for shape in self.shapes:
            # With He's initialization scale, activations neither vanish nor overflow while steps
            # are timed.
            scale = np.float32(np.sqrt(2 / np.prod(shape[:-1])))
            found += [rng.standard_normal(shape, np.float32) * scale]
            found += [np.zeros(shape[-1], np.float32)]
        return found

    def data(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's batch: inputs x (batch, 784) and classes y (batch,)."""
        own = np.random.default_rng(1000 + rank)
        x = own.standard_normal((self.batch, 784), np.float32)
        return x, own.integers(0, 10, self.batch)


CASES = {
    case.name: case
    for case in (
        ModelCase("mlp-1024", (1024, 1024), 32),
        ModelCase("mlp-2048", (2048, 2048), 64),
        ModelCase("cnn", (), 64),
        ModelCase("deep-mlp", (1024,) * 8, 256),
    )
}


@dataclass(frozen=True)
class WordCase:
    """A model with a large word embedding and a small dense layer, and a batch size."""

    name: str
    words: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        """Number of weights in the embedding and the dense layer."""
        return (self.words + 10) * self.width

    def arrays(self) -> list[np.ndarray]:
        """Return the initial embedding table (words, width) and dense layer (width, 10)."""
        rng = np.random.default_rng(7)
        return [
            rng.standard_normal(shape, np.float32)
            for shape in ((self.words, self.width), (self.width, 10))
        ]

    def data(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's batch: word indices x and classes y, both (batch,)."""
        own = np.random.default_rng(1000 + rank)
        return own.integers(0, self.words, self.batch), own.integers(0, 10, self.batch)


WORD_CASES = {case.name: case for case in (WordCase("embedding", 100_000, 64, 2_000),)}


class BenchModel:
    """A benchmark model that trains on one rank's batch by SGD with momentum.

    Args:
        case: Model and batch size; initial weights are equal on all ranks.
        rank: Rank whose batch of data is used.
    """

    def __init__(self, case: ModelCase | WordCase, rank: int) -> None:
        import tensorflow as tf

        x, y = case.data(rank)
        self.weights = [tf.Variable(array) for array in case.arrays()]
        self.momenta = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.x, self.y = tf.constant(x), tf.constant(y.astype(np.int32))

    def loss(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Return the mean cross-entropy of a batch."""
        return cross_entropy(y, self.scores(x))

    def scores(self, x: tf.Tensor) -> tf.Tensor:
        """Return the logits of all classes, of shape (batch, 10)."""
        for layer in range(len(self.weights) // 2):
            x = self.forward(layer, x)
        return x

    def forward(self, layer: int, x: tf.Tensor) -> tf.Tensor:
        """Apply the layer with the number `layer` to its input."""
        import tensorflow as tf

        weight, bias = self.weights[2 * layer : 2 * layer + 2]
        convolution = len(weight.shape) == 4
        if convolution:
            x = x if layer else tf.reshape(x, (-1, 28, 28, 1))
            x = tf.nn.bias_add(tf.nn.conv2d(x, weight, 1, "VALID"), bias)
        else:
            x = tf.nn.bias_add(x @ weight, bias)
        if layer == len(self.weights) // 2 - 1:
            return x
        x = tf.nn.relu(x)
        # The next layer is dense, so it needs pooled and flattened activations.
        if convolution and len(self.weights[2 * layer + 2].shape) == 2:
            x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), (-1, 9216))
        return x

    def step(self, mean: Averaging) -> Callable[[], np.ndarray]:
        """Return a compiled training step that averages gradients with `mean` before the update."""
        import tensorflow as tf

        step = tf.function(lambda x, y: self.train(x, y, mean), jit_compile=False)
        return lambda: step(self.x, self.y).numpy()

    def train(self, x: tf.Tensor, y: tf.Tensor, mean: Averaging) -> tf.Tensor:
        """Run the operations of one training step, and return its loss."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        self.update(mean(tape.gradient(loss, self.weights)))
        return loss

    def step_into_next(self, exchange: Exchange, count: int) -> Callable[[], np.ndarray]:
        """Return a function that runs `count` steps and updates a layer just before its next use.

        The steps use the priority schedule of the gradient exchange in `labkit.exchange.priority`.
        All weights are up to date after the call.
        """
        import tensorflow as tf

        from labkit.exchange.priority import MEASURED_STEPS

        variables = [weight.value() for weight in self.weights]
        layers = [number // 2 for number in range(len(variables))]
        exchange.prepare(variables, [f"gradient {n}" for n in range(len(variables))], layers)
        exchange.service.reorder_after(MEASURED_STEPS, exchange.by_priority)
        first = tf.function(lambda x, y: self._into_next(x, y, exchange, pending=False))
        further = tf.function(lambda x, y: self._into_next(x, y, exchange, pending=True))
        last = tf.function(lambda: self._update_all_layers(exchange))

        def steps() -> np.ndarray:
            loss = first(self.x, self.y)
            for _ in range(count - 1):
                loss = further(self.x, self.y)
            last()
            found: np.ndarray = loss.numpy()
            return found

        return steps

    def _into_next(
        self, x: tf.Tensor, y: tf.Tensor, exchange: Exchange, pending: bool
    ) -> tf.Tensor:
        import tensorflow as tf

        value = x
        with tf.GradientTape() as tape:
            for layer in range(len(self.weights) // 2):
                if pending:
                    with tape.stop_recording(), tf.control_dependencies([value]):
                        self._update_layer(exchange, layer)
                value = self.forward(layer, value)
            loss = cross_entropy(y, value)
        gradients = tape.gradient(loss, self.weights)
        # A step starts new gradient exchanges only after all exchanges of the previous step have
        # ended.
        with tf.control_dependencies([value]):
            issued = exchange.issue(gradients, tf.constant(1, tf.int64))
        with tf.control_dependencies(issued):
            return tf.identity(loss)

    def _update_all_layers(self, exchange: Exchange) -> None:
        for layer in range(len(self.weights) // 2):
            self._update_layer(exchange, layer)

    def _update_layer(self, exchange: Exchange, layer: int) -> None:
        """Wait for the mean gradients of a layer, and update the layer's weights."""
        own = range(2 * layer, 2 * layer + 2)
        self.update(exchange.wait(own), own)

    def update(self, gradients: list[tf.Tensor], indices: Iterable[int] | None = None) -> None:
        """Update the weights whose numbers are in `indices`; None: all weights."""
        import tensorflow as tf

        chosen = range(len(self.weights)) if indices is None else indices
        pairs = [(self.weights[number], self.momenta[number]) for number in chosen]
        for (weight, momentum), gradient in zip(pairs, gradients, strict=True):
            # Keras's optimizer also applies gradients by the TensorFlow operation
            # ResourceApplyKerasMomentum. A direct call of the TensorFlow operation avoids the
            # Python overhead of Keras's optimizer.
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle, accum=momentum.handle, lr=RATE, grad=gradient, momentum=MOMENTUM
            )

    def checksum(self) -> float:
        """Return a checksum of all weights; equal weights have equal checksums."""
        return checksum([weight.numpy() for weight in self.weights])


def checksum(weights: Iterable[ArrayLike]) -> float:
    """Return a checksum of arrays; equal arrays have equal checksums."""
    # The checksum sums absolute values in float64, because values of opposite sign would cancel.
    return float(sum(np.abs(np.asarray(w).astype(np.float64)).sum() for w in weights))


def cross_entropy(y: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Return the mean cross-entropy over a batch."""
    import tensorflow as tf

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
    return tf.reduce_mean(losses)


class WordModel(BenchModel):
    """A word model with plain SGD, which updates only the embedding rows of the batch's words."""

    def scores(self, x: tf.Tensor) -> tf.Tensor:
        """Return the logits of all classes, of shape (batch, 10), from word indices."""
        import tensorflow as tf

        table, layer = self.weights
        return tf.gather(table, x) @ layer

    def update(self, gradients: list[tf.Tensor], indices: Iterable[int] | None = None) -> None:
        """Update weights by plain SGD; change only those embedding rows that have a gradient."""
        import tensorflow as tf

        for weight, gradient in zip(self.weights, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                rows = tf.IndexedSlices(RATE * gradient.values, gradient.indices)
                weight.scatter_sub(rows)
            else:
                weight.assign_sub(RATE * gradient)
