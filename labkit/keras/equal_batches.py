"""A check that all ranks read the same global batches; each rank trains on a part of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, hooks_of, optimizers
from labkit.keras.whole_batch import print_on_first_rank

# For each component of a batch (x, y, …), the signature lists a pair (projection, norm) per tensor.
Signature = list[list[tuple[float, float]]]
KEPT = 16  # maximum number of stored batch signatures; the oldest are removed
TOLERANCE = 1e-4  # tolerance relative to the norm, because processors round differently

ENDLESS: WeakSet[Communicator] = WeakSet()  # communicators whose ranks shard an infinite dataset


class _Passes:
    """The signatures of a rank's first batch in each pass over each dataset."""

    def __init__(self) -> None:
        self.datasets = 0
        self._counts: Counter[int] = Counter()
        self.signatures: dict[tuple[int, int], Signature] = {}

    def begin(self) -> None:
        """Reset the count of passes; batches that were read before training do not count."""
        self._counts.clear()
        self.signatures.clear()

    def record(self, dataset: int, signature: Signature) -> None:
        """Record the signature of the first batch in the next pass over a dataset."""
        self._counts[dataset] += 1
        self.signatures[dataset, self._counts[dataset]] = signature
        if len(self.signatures) > KEPT:
            del self.signatures[next(iter(self.signatures))]


_PASSES: WeakKeyDictionary[Communicator, _Passes] = WeakKeyDictionary()


class EqualBatches(keras.callbacks.Callback):
    """A callback that compares the first global batch of each epoch over the ranks.

    The callback compares training batches and validation batches. Ranks may read different batches
    because of a shuffle without a seed, different files or different generators. Training would
    then use some samples twice and others never, so the callback raises an error. If only the
    features differ, the cause is probably a random augmentation before `shard`, so the callback
    only warns.

    Args:
        communicator: Communicator of the ranks whose batches are compared.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator
        self._batches, self._is_reported = 0, False

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Reset the counts of passes over datasets; warn if a sharded dataset is infinite."""
        _passes(self.communicator).begin()
        if self.communicator in ENDLESS and self.params.get("steps") is None:
            text = "the dataset given to shard has no end; pass steps_per_epoch=… to fit"
            print_on_first_rank(self.communicator, text)

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Reset the count of batches, so that the first batch of this epoch is compared."""
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compare the ranks' first batches before step 2, when every rank has read a batch."""
        # The method on_train_batch_end is not used, because Keras would then fetch the losses of
        # every step.
        self._batches += 1
        if self._batches == 2:
            self._compare()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Compare the first batches read since the last comparison, such as validation batches."""
        self._compare()

    def _compare(self) -> None:
        if self.communicator.size == 1:
            return
        for optimizer in optimizers(self.model):
            if (exchange := getattr(optimizer, "exchange", None)) is not None:
                exchange.service.settle()  # only one thread at a time may call MPI
        signatures_of_rank = dict(_passes(self.communicator).signatures)
        first, *others = self.communicator.allgather(
            signatures_of_rank, "the comparison of batches"
        )
        for rank, signatures in enumerate(others, start=1):
            # Only passes that both ranks have recorded are compared, because one rank may prefetch
            # batches or read them from a cache.
            for key in sorted(first.keys() & signatures.keys()):
                self._compare_batch(rank, first[key], signatures[key])

    def _compare_batch(self, rank: int, one: Signature, other: Signature) -> None:
        labels = slice(1 if len(one) > 1 else 0, None)
        if any(map(_differ, one[labels], other[labels])):
            hooks_of(self.model).clear()
            raise InvalidInput(
                f"ranks 0 and {rank} read different batches, so some rows would be trained twice "
                "and others never. Usual causes: shuffle without a seed, different files, random "
                "labels before shard, or one rank that iterated over the dataset. Give all ranks "
                "the same batches, or pass compare=False to callbacks"
            )
        if not self._is_reported and _differ(one[0], other[0]):
            self._is_reported = True
            text = "ranks read the same labels with different features; seed the random "
            print_on_first_rank(self.communicator, text + "augmentation, or map it after shard")


def record_first(communicator: Communicator) -> Callable[[tf.Tensor, Sequence[Batch]], None]:
    """Return a traceable function that records the first batch of each pass over a dataset."""
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
    """Return a tensor's projection, which depends on the order of its rows, and its norm."""
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
    """Return whether a component (such as y) of two batches differs, in values or sample order."""
    pairs = zip(one, other, strict=False)
    return any(abs(a - b) > TOLERANCE * max(n, m) for (a, n), (b, m) in pairs)
