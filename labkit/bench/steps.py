"""Training steps to measure: small models with plain variables, so that a framework's own costs
do not hide those of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

    from labkit.exchange import Exchange

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
        return cross_entropy(y, self.scores(x))

    def scores(self, x: tf.Tensor) -> tf.Tensor:
        """Of each class, (batch, 10)."""
        for layer in range(len(self.weights) // 2):
            x = self.forward(layer, x)
        return x

    def forward(self, layer: int, x: tf.Tensor) -> tf.Tensor:
        """What a layer makes of its input, by its weight and bias."""
        import tensorflow as tf

        weight, bias = self.weights[2 * layer : 2 * layer + 2]
        pictures = len(weight.shape) == 4
        if pictures:
            x = x if layer else tf.reshape(x, (-1, 28, 28, 1))
            x = tf.nn.bias_add(tf.nn.conv2d(x, weight, 1, "VALID"), bias)
        else:
            x = tf.nn.bias_add(x @ weight, bias)
        if layer == len(self.weights) // 2 - 1:
            return x
        x = tf.nn.relu(x)
        if pictures and len(self.weights[2 * layer + 2].shape) == 2:  # the last of its kind
            x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), (-1, 9216))
        return x

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

    def step_into_next(self, exchange: Exchange, count: int) -> Callable[[], np.ndarray]:
        """So many compiled steps, each of which updates layers right before it uses them.

        As `labkit.exchange.priority` does it; behind the last one, all is up to date.
        """
        import tensorflow as tf

        from labkit.exchange.priority import LEARN

        variables = [weight.value() for weight in self.weights]
        layers = [number // 2 for number in range(len(variables))]
        exchange.prepare(variables, [f"gradient {n}" for n in range(len(variables))], layers)
        exchange.service.reorder_after(LEARN, exchange.by_priority)
        first = tf.function(lambda x, y: self._into_next(x, y, exchange, pending=False))
        further = tf.function(lambda x, y: self._into_next(x, y, exchange, pending=True))
        last = tf.function(lambda: self._take_all(exchange))

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
                        self._take(exchange, layer)
                value = self.forward(layer, value)
            loss = cross_entropy(y, value)
        gradients = tape.gradient(loss, self.weights)
        with tf.control_dependencies([value]):  # a step issues after its last wait
            issued = exchange.issue(gradients, tf.constant(1, tf.int64))
        with tf.control_dependencies(issued):
            return tf.identity(loss)

    def _take_all(self, exchange: Exchange) -> None:
        for layer in range(len(self.weights) // 2):
            self._take(exchange, layer)

    def _take(self, exchange: Exchange, layer: int) -> None:
        """Wait for a layer's means, and change its weights."""
        own = range(2 * layer, 2 * layer + 2)
        self.update(exchange.wait(own), own)

    def update(self, gradients: list[tf.Tensor], which: Iterable[int] | None = None) -> None:
        """Change these weights; None: all of them."""
        import tensorflow as tf

        chosen = range(len(self.weights)) if which is None else which
        pairs = [(self.weights[number], self.momenta[number]) for number in chosen]
        for (weight, momentum), gradient in zip(pairs, gradients, strict=True):
            # The operation of Keras's own optimizer, without the Python around it.
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle, accum=momentum.handle, lr=RATE, grad=gradient, momentum=MOMENTUM
            )

    def checksum(self) -> float:
        """Equal where all weights are."""
        # In float64, and of magnitudes, which cannot cancel each other.
        return float(sum(np.abs(w.numpy().astype(np.float64)).sum() for w in self.weights))


def cross_entropy(y: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Its mean over a batch."""
    import tensorflow as tf

    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
    return tf.reduce_mean(losses)


class WordModel(Model):
    """The model of words, and plain SGD: of a table, it changes the rows of the batch alone."""

    def scores(self, x: tf.Tensor) -> tf.Tensor:
        """See `Model`."""
        import tensorflow as tf

        table, layer = self.weights
        return tf.gather(table, x) @ layer

    def update(self, gradients: list[tf.Tensor], which: Iterable[int] | None = None) -> None:
        """See `Model`."""
        import tensorflow as tf

        for weight, gradient in zip(self.weights, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                rows = tf.IndexedSlices(RATE * gradient.values, gradient.indices)
                weight.scatter_sub(rows)
            else:
                weight.assign_sub(RATE * gradient)
