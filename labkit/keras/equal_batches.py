"""Compare the global batches that ranks read: each trains its part of what must be the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, optimizers, seam
from labkit.keras.whole_batch import say_on_first

# Of one batch: for each component a list of (projection, norm), one pair a tensor.
Signature = list[list[tuple[float, float]]]
TOLERANCE = 1e-4  # of the norm: hosts with other processors round otherwise

ENDLESS: WeakSet[Communicator] = WeakSet()  # whose ranks divide a dataset that has no end
_FIRST: WeakKeyDictionary[Communicator, deque[Signature]] = WeakKeyDictionary()


class EqualBatches(keras.callbacks.Callback):
    """Compares over the ranks the first global batch of each epoch, in training and validation.

    A shuffle without a seed, other files, or a generator of its own on each rank would otherwise
    train rows twice and leave others out. Batches whose labels agree and whose features differ are
    those of a random augmentation before `shard`: a line reports them.

    Args:
        communicator: the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator
        self._batches, self._is_reported = 0, False

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Tell of an epoch that may never end."""
        if self.communicator in ENDLESS and self.params.get("steps") is None:
            text = "a dataset given to shard has no end: an epoch ends with steps_per_epoch=… alone"
            say_on_first(self.communicator, text)

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Forget batches that were read before training."""
        _first_batches(self.communicator).clear()
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compare before the second step: the first batch has been read by then."""
        # Not behind the first step: Keras fetches the losses of every step for such a callback.
        self._batches += 1
        if self._batches == 2:
            self._compare()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Compare what has been read since, such as validation data."""
        self._compare()

    def _compare(self) -> None:
        first = _first_batches(self.communicator)
        signatures = sorted(first)
        first.clear()
        if self.communicator.size == 1:
            return
        for optimizer in optimizers(self.model):
            if (exchange := getattr(optimizer, "exchange", None)) is not None:
                exchange.service.settle()  # one thread at a time
        gathered = self.communicator.allgather(signatures, "the comparison of batches")
        # Ranks that read from a cache have none.
        ranks = [rank for rank, others in enumerate(gathered) if others]
        for rank in ranks[1:]:
            pairs = list(zip(gathered[ranks[0]], gathered[rank], strict=False))
            if any(_differ(one[-1], other[-1]) for one, other in pairs):
                seam(self.model).clear()
                raise InvalidInput(
                    f"rank {rank} reads other global batches than rank {ranks[0]}, so rows are "
                    "trained twice or never: give shuffle(…, seed=1) and generators a seed, and "
                    "all ranks the same files"
                )
            if not self._is_reported and any(_differ(one[0], other[0]) for one, other in pairs):
                self._is_reported = True
                text = "ranks read batches of equal labels and different features: seed random "
                say_on_first(self.communicator, text + "maps, or place them behind shard")


def record_first(communicator: Communicator) -> Callable[[tf.Tensor, Sequence[Batch]], None]:
    """What notes the first batch of every pass over a dataset, for `EqualBatches`; traced."""

    def note(*sums: np.ndarray) -> np.int32:
        pairs = [[(float(a), float(b)) for a, b in component] for component in sums]
        _first_batches(communicator).append(pairs)
        return np.int32(0)

    def watch(index: tf.Tensor, batch: Sequence[Batch]) -> None:
        def sign() -> tf.Tensor:
            leaves = [keras.tree.flatten(component) for component in batch]
            tensors = [[leaf for leaf in part if leaf is not None] for part in leaves]
            sums = [tf.stack([_project(leaf) for leaf in part]) for part in tensors if part]
            return tf.numpy_function(note, sums, tf.int32)

        tf.cond(tf.equal(index, 0), sign, lambda: tf.constant(0))

    return watch


def _first_batches(communicator: Communicator) -> deque[Signature]:
    return _FIRST.setdefault(communicator, deque(maxlen=16))


def _project(leaf: tf.Tensor | tf.SparseTensor | tf.RaggedTensor) -> tf.Tensor:
    """Two numbers that change with the order of a tensor's rows: a projection and the norm."""
    values = leaf
    if isinstance(leaf, tf.RaggedTensor):
        values = leaf.flat_values
    elif isinstance(leaf, tf.SparseTensor):
        where = tf.cast(tf.reshape(leaf.indices, [-1]), tf.float32)
        values = tf.concat([_numbers(leaf.values), where], axis=0)
    flat = _numbers(values)
    weights = tf.cos(tf.range(tf.size(flat, tf.int64), dtype=tf.float32) * np.sqrt(2))
    return tf.stack([tf.reduce_sum(flat * weights), tf.norm(flat)])


def _numbers(values: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.string:
        values = tf.strings.to_hash_bucket_fast(values, 1 << 20)
    return tf.reshape(tf.cast(values, tf.float32), [-1])


def _differ(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Whether two components of a batch have other values or another order."""
    pairs = zip(one, other, strict=False)
    return any(abs(a - b) > TOLERANCE * max(n, m) for (a, n), (b, m) in pairs)
