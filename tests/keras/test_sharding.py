"""What people give to `shard`: cut as one process reads it, or refused in one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

ROWS = 61  # the last batch of 12 has one row: most ranks have none of it
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


def dense(*inputs: Any, head: Any = None) -> Any:
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

    embed = keras.layers.Embedding(10, 3)
    return layers(keras.Input((None,), ragged=True, dtype="int64"), embed, MeanOfWords())


def MeanOfWords() -> Any:  # noqa: N802  (a layer, made where Keras is)
    import keras

    return keras.layers.GlobalAveragePooling1D()


def colours() -> Any:
    import keras

    lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
    return layers(keras.Input((1,), dtype="string"), lookup)


def named() -> Any:
    import keras

    return dense(keras.Input((6,), name="a"), keras.Input((6,), name="b"))


def images() -> Any:
    import keras

    return layers(keras.Input((6, 1, 1)), keras.layers.Rescaling(0.1), keras.layers.Flatten())


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


CUBES = X[..., None, None]
SEQUENCES = X[..., None]
Make = Callable[[], Any]
# Model, dataset of a rank, model of one process where it is another, options of `fit`.
ALIKE: dict[str, tuple[Make, Callable[[int], Any], Make | None, dict[str, int]]] = {
    "uneven last batch": (dense, lambda _: slices(X, Y), None, {}),
    "batches of known size": (dense, lambda _: slices(X, Y, drop_remainder=True), None, {}),
    "sparse": (sparse_input, sparse, None, {}),
    "ragged": (bags, ragged, None, {}),
    "dictionary": (named, lambda _: slices({"a": X, "b": BAG}, Y), None, {}),
    "nested inputs": (named, lambda _: slices((X, BAG), Y), None, {}),
    "sample weights": (dense, lambda _: slices(X, Y, np.abs(X[:, 0])), None, {}),
    "texts": (colours, lambda _: slices(TEXTS, Y), None, {}),
    "bytes": (images, lambda _: slices((CUBES * 9).astype(np.uint8), Y), None, {}),
    "no end": (dense, lambda _: slices(X, Y).repeat(), None, {"steps_per_epoch": 4}),
    "generator": (dense, lambda _: generated(0), None, {}),
    "seeded shuffle": (
        dense,
        lambda _: slices(X, Y).unbatch().shuffle(ROWS, seed=1).batch(12),
        None,
        {},
    ),
    "states of a part": (
        lambda: stateful(3),
        lambda _: slices(SEQUENCES, Y, drop_remainder=True),
        lambda: stateful(12),
        {},
    ),
}
NO_BATCHES = "no batches of equal rows: call dataset.batch"
TAKES = "shard takes a tf.data.Dataset of global batches, not a"
UNSEEDED = "shuffles or samples without a seed"
OTHERS = "reads other global batches than rank 0"
FIXED = "batch is fixed to 12 rows, and this rank's part has"
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
        f"{FIXED} 3",
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


def differences(communicator: Any) -> dict[str, float]:
    found = {}
    for name, (make, data, make_alone, options) in ALIKE.items():
        rank = communicator.rank
        ours = fitted(communicator, make, data(rank), options, alone=False)
        if rank == 0:
            one = fitted(communicator, make_alone or make, data(rank), options, alone=True)
            pairs = zip(ours, one, strict=True)
            found[name] = max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)
    return found


def read_first(communicator: Any, data: Any) -> None:
    """Read one batch as an epoch does, without the minutes that many models take."""
    from labkit import keras as lkk
    from labkit.keras.equal_batches import EqualBatches

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


def sentences(communicator: Any) -> dict[str, str]:
    import tensorflow as tf

    found = {}
    for name, (make, data, _) in REFUSED.items():
        tf.random.set_seed(0)
        tf.compat.v1.set_random_seed(None)  # a global seed would seed every shuffle
        try:
            if name != "seed of the rank":
                read_first(communicator, data(communicator.rank))
            fitted(communicator, make, data(communicator.rank), {}, alone=False)
            found[name] = "trained"
        except Exception as error:
            found[name] = str(error)
        communicator.meet("the next case")
    return found


# --- what the tests see --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> dict[str, float]:
    return cluster.call(differences)[0]


@pytest.fixture(scope="module")
def refusals(cluster: Cluster) -> list[dict[str, str]]:
    return cluster.call(sentences)


@pytest.mark.parametrize("name", ALIKE)
def test_batches_of_any_kind_are_cut_as_one_process_reads_them(
    trained: dict[str, float], name: str
) -> None:
    assert trained[name] < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_on_every_rank(
    refusals: list[dict[str, str]], name: str
) -> None:
    for found in refusals:
        assert REFUSED[name][2] in found[name]


def test_random_augmentation_before_shard_is_said(cluster: Cluster) -> None:
    first, *others = cluster.call(said_of_augmentation)
    assert "equal labels and different features" in first
    assert not any(others)
