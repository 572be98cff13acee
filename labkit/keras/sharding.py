"""Division of global batches among ranks: each rank trains on some samples of each batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.common.nearest import named_arguments
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, Rows, hooks_of, optimizers, rows_of
from labkit.keras.whole_batch import print_on_first_rank

# A batch's signature (checksum) lists, for each component (x, y, …), one pair (projection, norm)
# per tensor.
Signature = list[list[tuple[float, float]]]
KEPT = 16  # A rank stores at most KEPT signatures (checksums) of batches, and removes the oldest.
# Checksums of equal batches may differ by TOLERANCE times the norm, because processors round
# differently.
TOLERANCE = 1e-4

# The set ENDLESS contains the communicators whose ranks divide an infinite dataset.
ENDLESS: WeakSet[Communicator] = WeakSet()


class _Passes:
    """Signatures (checksums) of the first batch that a rank reads in each pass over a dataset."""

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
    """A callback that checks in each epoch whether all ranks read the same first global batch.

    The callback compares training batches and validation batches. Ranks may read different batches
    because of a shuffle without a seed, different files or different generators. The callback
    raises an error if the ranks' batches differ. If only the features differ, the cause is probably
    a random augmentation before `shard`. For different features, the callback only warns.

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
        """Reset the count of batches, so that the first batch of the new epoch is compared."""
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
                # Only one thread at a time may call MPI. The method `settle` therefore waits until
                # the gradient exchange thread is idle.
                exchange.service.settle()
        signatures_of_rank = dict(_passes(self.communicator).signatures)
        first, *others = self.communicator.allgather(
            signatures_of_rank, "the comparison of batches"
        )
        for rank, signatures in enumerate(others, start=1):
            # A rank may prefetch or cache batches. The code therefore compares only passes over a
            # dataset that both ranks recorded.
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
    """Return a tensor's projection on fixed weights, which detects reordered rows, and its norm."""
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
    """Return whether one component of two batches, such as y, differs in values or sample order."""
    pairs = zip(one, other, strict=False)
    return any(abs(a - b) > TOLERANCE * max(n, m) for (a, n), (b, m) in pairs)


Leaf: TypeAlias = "tf.Tensor | tf.SparseTensor | tf.RaggedTensor | None"
Watch: TypeAlias = "Callable[[tf.Tensor, tuple[Batch, ...]], None]"


@named_arguments()
def shard(
    dataset: tf.data.Dataset,
    communicator: Communicator,
    batch_weights: Sequence[float] | None = None,
) -> tf.data.Dataset:
    """Return a dataset that contains this rank's part of every global batch.

    All ranks must read the same global batches, so pass a seed to `shuffle`. The callback
    `EqualBatches`, which is part of `callbacks`, compares the first batch of each epoch between
    ranks. A rank's part of a batch may be empty, but every rank takes the same number of steps.

    Args:
        dataset: Dataset of global batches of dense, sparse or ragged tensors.
        communicator: Communicator of the ranks that divide each batch.
        batch_weights: Relative sizes of the ranks' parts, one positive number per rank; default:
            equal parts.

    Raises:
        InvalidInput: The elements of the dataset are not batches, or the dataset shuffles without a
            seed.
    """
    shares = batch_weights or [1.0] * communicator.size
    if len(shares) != communicator.size or min(shares) <= 0:
        raise InvalidInput(
            f"batch_weights={list(shares)}: give {communicator.size} numbers above 0, one per rank"
        )
    if not isinstance(dataset, tf.data.Dataset):
        raise InvalidInput(
            f"shard takes a tf.data.Dataset of global batches, not a {type(dataset).__name__}; use "
            "tf.data.Dataset.from_tensor_slices((x, y)).batch(…), or .from_generator(…)"
        )
    _check_batches(dataset)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        ENDLESS.add(communicator)
    if communicator.size == 1:
        return part_of(dataset, communicator.rank, shares)
    if any(_is_unseeded(source) for source in _sources(dataset)):
        raise InvalidInput(
            "the dataset shuffles or samples without a seed, so ranks would train some rows twice "
            "and others never: give shuffle(…, seed=1), or list_files(…, seed=1), before shard"
        )
    return part_of(dataset, communicator.rank, shares, record_first(communicator))


def part_of(
    dataset: tf.data.Dataset, number: int, shares: Sequence[float], watch: Watch | None = None
) -> tf.data.Dataset:
    """Return a dataset that contains one part of every global batch.

    Args:
        dataset: Dataset of global batches.
        number: Index of the part in `shares`, from 0.
        shares: Relative sizes of all parts of a batch.
        watch: Traceable function of a batch number and a batch. The dataset calls the function for
            each global batch. With None, the dataset calls no function.
    """
    # The boundaries between the ranks' samples follow the formula of `common.rows.cut`, so that all
    # ranks agree.
    cumulative = np.concatenate([[0.0], np.cumsum(shares)]) / np.sum(shares)

    def end(rows: int | tf.Tensor, rank: int) -> int | tf.Tensor:
        # If TensorFlow knows the number of samples when it traces, the boundaries are Python
        # integers.
        if isinstance(rows, int):
            return int(np.floor(rows * cumulative[rank] + 1e-9))
        return tf.cast(tf.floor(tf.cast(rows, tf.float64) * cumulative[rank] + 1e-9), tf.int32)

    def cut(*batch: Batch) -> Batch:
        rows = _equal_rows(batch)
        first, last = end(rows, number), end(rows, number + 1)
        part: tuple[Batch, ...] = keras.tree.map_structure(
            lambda leaf: _slice(leaf, first, last), batch
        )
        return part if len(part) > 1 else part[0]

    plain = tf.autograph.experimental.do_not_convert
    if watch is None:
        return dataset.map(plain(cut), num_parallel_calls=1).prefetch(2)

    def watch_and_cut(index: tf.Tensor, batch: Batch) -> Batch:
        # A batch that is a tuple is unpacked into its items, as in `tf.data.Dataset.map`.
        parts = batch if type(batch) is tuple else (batch,)
        watch(index, parts)
        return cut(*parts)

    return dataset.enumerate().map(plain(watch_and_cut), num_parallel_calls=1).prefetch(2)


def check_fixed_batch(model: keras.Model, rows: Rows) -> None:
    """Raise an error if a stateful model's batch size differs from this rank's part of the batch.

    Raises:
        InvalidInput: A stateful layer has states for another number of samples than this rank's
            batches contain.
    """
    # The list `shapes` contains the shapes of layer states. If the model accepts any batch size,
    # the list `shapes` is empty.
    shapes = []
    for layer in model._flatten_layers(include_self=False):
        if getattr(layer, "stateful", False):
            shapes += [state.shape for state in keras.tree.flatten(layer.states or [])]
    sizes = {shape[0] for shape in shapes if len(shape) and shape[0] is not None}
    if sizes and not (isinstance(rows, int) and sizes == {rows}):
        part = f"{rows}" if isinstance(rows, int) else "no fixed number"
        raise InvalidInput(
            f"a stateful layer takes batches of exactly {min(sizes)} rows, but this rank's part "
            f"of a batch has {part}; set the rows of a part in keras.Input(batch_shape=…), and "
            "call batch(…, drop_remainder=True)"
        )


def _check_batches(dataset: tf.data.Dataset) -> None:
    """Raise an error if a dataset's elements are not batches whose rows can be divided."""
    specs = keras.tree.flatten(dataset.element_spec)
    kinds = (
        tf.TensorSpec,
        tf.SparseTensorSpec,
        tf.RaggedTensorSpec,
        type(tf.type_spec_from_value(None)),
    )
    for spec in specs:
        if not isinstance(spec, kinds):
            raise InvalidInput(
                f"shard divides batches of dense, sparse and ragged tensors, not a "
                f"{type(spec).__name__.removesuffix('Spec')}: map the dataset to tensors"
            )
    shapes = [spec.shape for spec in specs if hasattr(spec, "shape")]
    rows = {shape[0] for shape in shapes if shape.rank} - {None}
    if any(shape.rank == 0 for shape in shapes) or len(rows) > 1:
        raise InvalidInput(
            f"shard divides batches, but elements of shapes {', '.join(map(str, shapes))} are not "
            "batches of equal rows: call dataset.batch(…) before shard"
        )


def _equal_rows(batch: tuple[Batch, ...]) -> int | tf.Tensor:
    """Return a batch's number of samples, as an int if the shape of any tensor is static."""
    counts = [rows_of(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None]
    known = [count for count in counts if isinstance(count, int)]
    rows = known[0] if known else counts[0]
    text = "shard divides batches, but the tensors of this batch have different numbers of rows"
    checks = [tf.debugging.assert_equal(count, rows, text) for count in counts if count is not rows]
    if isinstance(rows, int):
        return rows
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(rows)


def _slice(leaf: Leaf, first: int | tf.Tensor, last: int | tf.Tensor) -> Leaf:
    # A leaf of a dataset element may be None, for example y in the element (x, None).
    if leaf is None:
        return None
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[first:last]
    start = tf.concat([[first], tf.zeros(tf.rank(leaf) - 1, tf.int32)], axis=0)
    size = tf.concat([[last - first], tf.cast(leaf.dense_shape[1:], tf.int32)], axis=0)
    part = tf.sparse.slice(leaf, tf.cast(start, tf.int64), tf.cast(size, tf.int64))
    rows = last - first if isinstance(first, int) and isinstance(last, int) else None
    part.set_shape([rows, *leaf.shape[1:]])
    return part


def _sources(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset and all datasets from which it reads, directly or indirectly."""
    yield dataset
    for source in dataset._inputs():
        yield from _sources(source)


def _is_unseeded(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset draws random numbers without a seed (TensorFlow's seeds 0, 0)."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    return all(seed is not None and tf.get_static_value(seed) == 0 for seed in seeds)
