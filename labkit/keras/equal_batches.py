"""Compare the global batches that ranks read: each trains its part of what must be the same."""

from __future__ import annotations

from collections import Counter
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
KEPT = 16  # signatures, the newest
TOLERANCE = 1e-4  # of the norm: hosts with other processors round otherwise

ENDLESS: WeakSet[Communicator] = WeakSet()  # whose ranks divide a dataset that has no end


class _Passes:
    """First batches of the datasets that a rank divides, by dataset and pass over it."""

    def __init__(self) -> None:
        self.datasets = 0
        self._counts: Counter[int] = Counter()
        self.signatures: dict[tuple[int, int], Signature] = {}

    def begin(self) -> None:
        """Count passes from here: what was read before is no part of the training."""
        self._counts.clear()
        self.signatures.clear()

    def record(self, dataset: int, signature: Signature) -> None:
        """Note the first batch of the next pass over a dataset."""
        self._counts[dataset] += 1
        self.signatures[dataset, self._counts[dataset]] = signature
        if len(self.signatures) > KEPT:
            del self.signatures[next(iter(self.signatures))]


_PASSES: WeakKeyDictionary[Communicator, _Passes] = WeakKeyDictionary()


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
        """Count passes from the start of training; tell of an epoch that may never end."""
        _passes(self.communicator).begin()
        if self.communicator in ENDLESS and self.params.get("steps") is None:
            text = "a dataset given to shard repeats for ever: give fit steps_per_epoch=…"
            say_on_first(self.communicator, text)

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Compare in this epoch, too."""
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
        if self.communicator.size == 1:
            return
        for optimizer in optimizers(self.model):
            if (exchange := getattr(optimizer, "exchange", None)) is not None:
                exchange.service.settle()  # one thread at a time
        own = dict(_passes(self.communicator).signatures)
        first, *others = self.communicator.allgather(own, "the comparison of batches")
        for rank, signatures in enumerate(others, start=1):
            # A rank may have read ahead, or read from a cache: only common passes are compared.
            for key in sorted(first.keys() & signatures.keys()):
                self._compare_batch(rank, first[key], signatures[key])

    def _compare_batch(self, rank: int, one: Signature, other: Signature) -> None:
        labels = slice(1 if len(one) > 1 else 0, None)
        if any(map(_differ, one[labels], other[labels])):
            seam(self.model).clear()
            raise InvalidInput(
                f"ranks 0 and {rank} read different batches, so rows would be trained twice or "
                "never. Usual causes: shuffle without a seed, other files, labels drawn at random "
                "before shard, or one rank that iterated over the dataset. Give all ranks the "
                "same batches, or compare=False to callbacks"
            )
        if not self._is_reported and _differ(one[0], other[0]):
            self._is_reported = True
            text = "ranks read the same labels with different features: if that is random "
            say_on_first(self.communicator, text + "augmentation, seed it or map it after shard")


def record_first(communicator: Communicator) -> Callable[[tf.Tensor, Sequence[Batch]], None]:
    """What notes the first batch of every pass over a dataset, for `EqualBatches`; traced."""
    passes = _passes(communicator)
    passes.datasets += 1
    number = passes.datasets

    def note(*sums: np.ndarray) -> np.int32:
        signature = [[(float(a), float(b)) for a, b in component] for component in sums]
        passes.record(number, signature)
        return np.int32(0)

    def watch(index: tf.Tensor, batch: Sequence[Batch]) -> None:
        def sign() -> tf.Tensor:
            leaves = [keras.tree.flatten(component) for component in batch]
            tensors = [[leaf for leaf in part if leaf is not None] for part in leaves]
            sums = [tf.stack([_project(leaf) for leaf in part]) for part in tensors if part]
            return tf.numpy_function(note, sums, tf.int32)

        tf.cond(tf.equal(index, 0), sign, lambda: tf.constant(0))

    return watch


def _passes(communicator: Communicator) -> _Passes:
    return _PASSES.setdefault(communicator, _Passes())


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
