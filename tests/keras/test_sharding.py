"""Test data passed to `shard`: split as one process reads it, or refused in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

ROWS = 61  # the last batch has one row, so one of two ranks has none
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(ROWS, 6)).astype(np.float32)
Y = RANDOM.integers(0, 4, ROWS)
BAG = (np.abs(X) > 1).astype(np.float32)
WORDS = [list(RANDOM.integers(1, 9, length)) for length in RANDOM.integers(1, 6, ROWS)]
TEXTS = np.array(["red", "green", "blue"])[Y % 3][:, None]

# --- what runs on the ranks ----------------------------------------------------------------------


def slices(*parts: Any, batch: int = 12, **options: bool) -> Any:
    import tensorflow as tf

    data = parts if len(parts) > 1 else parts[0]
    return tf.data.Dataset.from_tensor_slices(data).batch(batch, **options)


def dense(*inputs: Any) -> Any:
    import keras

    inputs = inputs or (keras.Input((6,)),)
    hidden = [keras.layers.Dense(4)(one) for one in inputs]
    x = keras.layers.Add()(hidden) if len(hidden) > 1 else hidden[0]
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], x)


def layers(*parts: Any) -> Any:
    import keras

    return keras.Sequential([*parts, keras.layers.Dense(4)])


def stateful(rows: int) -> Any:
    import keras

    return layers(keras.Input(batch_shape=(rows, 6, 1)), keras.layers.LSTM(3, stateful=True))


def bags() -> Any:
    import keras

    embed, mean = keras.layers.Embedding(10, 3), keras.layers.GlobalAveragePooling1D()
    return layers(keras.Input((None,), ragged=True, dtype="int64"), embed, mean)


def colours() -> Any:
    import keras

    lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
    return layers(keras.Input((1,), dtype="string"), lookup)


def named() -> Any:
    import keras

    return dense(keras.Input((6,), name="a"), keras.Input((6,), name="b"))


def sparse_input() -> Any:
    import keras

    return dense(keras.Input((6,), sparse=True))


def sparse(*_: int) -> Any:
    import tensorflow as tf

    return slices(tf.sparse.from_dense(BAG), Y)


def ragged(*_: int) -> Any:
    import tensorflow as tf

    return slices(tf.ragged.constant(WORDS, dtype=tf.int64), Y)


def generated(seed: int) -> Any:
    import tensorflow as tf

    def batches() -> Any:
        order = np.random.default_rng(seed).permutation(ROWS)
        yield from ((X[order[n : n + 12]], Y[order[n : n + 12]]) for n in range(0, ROWS, 12))

    kinds = tf.TensorSpec((None, 6), tf.float32), tf.TensorSpec((None,), tf.int64)
    return tf.data.Dataset.from_generator(batches, output_signature=kinds)


def weighted(*_: int) -> Any:
    return slices(X, Y, np.abs(X[:, 0])).unbatch().shuffle(ROWS, seed=1).batch(12)


def augmented(seed: int) -> Any:
    import tensorflow as tf

    def noisy(x: Any, y: Any) -> Any:
        return x + tf.random.normal(tf.shape(x), seed=seed + 1), y

    return slices(X, Y).map(noisy)


def peeked(rank: int) -> Any:
    found = slices(X, Y).unbatch().shuffle(ROWS, seed=1).batch(12)
    if rank == 0:
        next(iter(found))
    return found


def sampled(*_: int) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.sample_from_datasets([slices(X, Y), slices(X, Y)])


def listed(*_: int) -> Any:
    import tensorflow as tf

    files = tf.data.Dataset.list_files(f"{os.path.dirname(os.__file__)}/*.py")
    return files.batch(2)


def uneven(*_: int) -> Any:
    return slices(X, Y).map(lambda x, y: (x, y[:3]))


def sequence(*_: int) -> Any:
    import keras

    class Sequence(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> Any:
            return X[:12], Y[:12]

    return Sequence()


def frame(*_: int) -> Any:
    import pandas as pd

    return pd.DataFrame(X)


SEQUENCES = X[..., None]
Make = Callable[[], Any]
# Each entry has a model, a rank's dataset, a different model for one process if any, and options of
# `fit`.
ALIKE: dict[str, tuple[Make, Callable[[int], Any], Make | None, dict[str, int]]] = {
    "uneven last batch": (dense, lambda _: slices(X, Y), None, {}),
    "sparse": (sparse_input, sparse, None, {}),
    "ragged": (bags, ragged, None, {}),
    "dictionary": (named, lambda _: slices({"a": X, "b": BAG}, Y), None, {}),
    "seeded shuffle, sample weights": (dense, weighted, None, {}),
    "texts": (colours, lambda _: slices(TEXTS, Y), None, {}),
    "no end": (dense, lambda _: slices(X, Y).repeat(), None, {"steps_per_epoch": 4}),
    "generator": (dense, lambda _: generated(0), None, {}),
    "states of a part": (
        lambda: stateful(6),
        lambda _: slices(SEQUENCES, Y, drop_remainder=True),
        lambda: stateful(12),
        {},
    ),
}
NO_BATCHES = "not batches of equal rows: call dataset.batch"
TAKES = "shard takes a tf.data.Dataset of global batches, not a"
UNSEEDED = "shuffles or samples without a seed"
OTHERS = "read different batches"
FIXED = "batches of exactly 12 rows, but this rank's part of a batch has"
REFUSED: dict[str, tuple[Make, Callable[[int], Any], str]] = {
    "PyDataset": (dense, sequence, f"{TAKES} Sequence"),
    "arrays": (dense, lambda _: (X, Y), f"{TAKES} tuple"),
    "Python generator": (dense, lambda _: ((X, Y) for _ in range(3)), f"{TAKES} generator"),
    "data frame": (dense, frame, f"{TAKES} DataFrame"),
    "iterator": (dense, lambda _: iter(slices(X, Y)), f"{TAKES} OwnedIterator"),
    "nothing": (dense, lambda _: None, f"{TAKES} NoneType"),
    "samples": (dense, lambda _: slices(X, Y).unbatch(), NO_BATCHES),
    "samples of two shapes": (dense, lambda _: slices(X, BAG[:, :4]).unbatch(), NO_BATCHES),
    "windows": (dense, lambda _: slices(X).unbatch().window(4), "tensors, not a Dataset"),
    "other rows of x and y": (dense, uneven, "different numbers of rows"),
    "unseeded shuffle": (dense, lambda _: slices(X, Y).shuffle(9).prefetch(1), UNSEEDED),
    "unseeded sampling": (dense, sampled, UNSEEDED),
    "unseeded list of files": (dense, listed, UNSEEDED),
    "seed of the rank": (dense, lambda r: slices(X, Y).shuffle(9, seed=r + 1), OTHERS),
    "generator of the rank": (dense, generated, OTHERS),
    "files of the rank": (dense, lambda r: slices(np.roll(X, r, 0), np.roll(Y, r)), OTHERS),
    "sparse of the rank": (
        sparse_input,
        lambda r: sparse().shuffle(9, seed=r + 1),
        OTHERS,
    ),
    "ragged of the rank": (bags, lambda r: ragged().shuffle(9, seed=r + 1), OTHERS),
    "shuffle that one rank has read": (dense, peeked, OTHERS),
    "fixed batch": (
        lambda: stateful(12),
        lambda _: slices(SEQUENCES, Y, drop_remainder=True),
        f"{FIXED} 6",
    ),
    "fixed batch, unknown part": (
        lambda: stateful(12),
        lambda _: slices(SEQUENCES[:60], Y[:60]),
        f"{FIXED} no fixed number",
    ),
}


def fitted(communicator: Any, make: Make, data: Any, options: dict[str, int], alone: bool) -> Any:
    import keras

    from labkit import keras as lkk

    keras.utils.set_random_seed(7)
    model, optimizer = make(), keras.optimizers.SGD(0.1)
    if not alone:
        optimizer = lkk.DistributedOptimizer(optimizer, communicator)
        data = lkk.shard(data, communicator)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [] if alone else lkk.callbacks(communicator)
    history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks, **options).history
    return [*model.get_weights()[-2:], history["accuracy"], history["loss"]]


def difference(communicator: Any, name: str) -> float:
    make, data, make_alone, options = ALIKE[name]
    ours = fitted(communicator, make, data(communicator.rank), options, alone=False)
    if communicator.rank > 0:
        return 0.0
    one = fitted(communicator, make_alone or make, data(0), options, alone=True)
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(ours, one, strict=True))


def read_first(communicator: Any, data: Any) -> None:
    """Read one batch as an epoch does, without training, which takes minutes for many models."""
    from labkit import keras as lkk
    from labkit.keras.sharding import EqualBatches

    callback = EqualBatches(communicator)
    callback.set_model(dense())
    callback.on_epoch_begin(0)
    next(iter(lkk.shard(data, communicator)))
    callback.on_epoch_end(0)


def said_of_augmentation(communicator: Any) -> str:
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as text:
        read_first(communicator, augmented(communicator.rank))
    return text.getvalue()


def sentence(communicator: Any, name: str) -> str:
    import tensorflow as tf

    make, data, _ = REFUSED[name]
    tf.compat.v1.set_random_seed(None)  # a process-wide seed would seed every shuffle
    try:
        if name != "seed of the rank":
            read_first(communicator, data(communicator.rank))
        fitted(communicator, make, data(communicator.rank), {}, alone=False)
    except Exception as error:
        communicator.barrier("the end of the case")
        return str(error)
    return "trained"


# --- what the tests see --------------------------------------------------------------------------


@pytest.mark.battery(2, 3)
@pytest.mark.parametrize("name", ALIKE)
def test_batches_of_any_kind_are_cut_as_one_process_reads_them(cluster: Cluster, name: str) -> None:
    assert max(cluster.call(difference, name, ranks=2)) < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_on_every_rank(cluster: Cluster, name: str) -> None:
    for found in cluster.call(sentence, name, ranks=2):
        assert REFUSED[name][2] in found


def test_random_augmentation_before_shard_is_said(cluster: Cluster) -> None:
    first, other = cluster.call(said_of_augmentation, ranks=2)
    assert "same labels with different features" in first
    assert not other
