"""Losses and normalizations of ranks' parts are those of the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

TOLERANCE = 1e-12  # of the largest weight of a parameter


def learned(
    communicator: Any,
    make: Callable[[], Any],
    data: Any,
    compiled: Callable[[], dict[str, Any]],
    optimizer: Callable[[], Any],
    batch: int = 8,
    capacities: Any = None,
    drop: bool = False,
    precision: str = "float64",
) -> dict[str, Any]:
    """Weights and history of the ranks and of one process, from the same start."""
    import keras
    import tensorflow as tf

    from labkit import keras as lkk

    keras.backend.clear_session()
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(communicator.rank)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch, drop_remainder=drop)
    ours = make()
    start = communicator.share(ours.get_weights())
    distributed = lkk.DistributedOptimizer(optimizer(), communicator)
    ours.compile(optimizer=distributed, **compiled())
    parts = lkk.shard(batches, communicator, capacities)
    fitted = ours.fit(
        parts, validation_data=parts, epochs=2, verbose=0, callbacks=lkk.callbacks(communicator)
    )
    one = make()
    one.set_weights(start)
    one.compile(optimizer=optimizer(), **compiled())
    alone = one.fit(batches, validation_data=batches, epochs=2, verbose=0)
    pairs = list(zip(ours.get_weights(), one.get_weights(), strict=True))
    return {
        "difference": float(
            max(np.abs(a - b).max() / max(1e-3, np.abs(b).max()) for a, b in pairs)
        ),
        "moved": float(max(np.abs(b - s).max() for (_, b), s in zip(pairs, start, strict=True))),
        "history": fitted.history,
        "alone": alone.history,
    }


def same(results: list[dict[str, Any]], tolerance: float = TOLERANCE, rtol: float = 1e-9) -> None:
    """What ranks learned is what one process did."""
    for result in results:
        assert result["difference"] <= tolerance
        assert result["moved"] > 1e-3
        for name, values in result["alone"].items():
            np.testing.assert_allclose(result["history"][name], values, rtol=rtol, err_msg=name)


def sgd() -> Any:
    import keras

    return keras.optimizers.SGD(0.1, momentum=0.9)


def dense() -> Any:
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="tanh")])


def weighted(count: int) -> Any:
    random = np.random.default_rng(5)
    x, y = random.standard_normal((count, 6)), random.standard_normal((count, 3))
    return x, y, random.uniform(0.1, 3, count)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight", "sum_over_batch_size"])
def test_reductions_of_weighted_samples(cluster: Cluster, reduction: str) -> None:
    """8 + 8 + 2 rows on 3 ranks: parts are unequal, and one is empty."""

    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> Any:
            return {"loss": keras.losses.Huber(reduction=reduction), "weighted_metrics": ["mae"]}

        return learned(communicator, dense, weighted(18), compiled, sgd)

    same(cluster.call(work, ranks=3))


def words() -> Any:
    """The masked model that plain Keras trains."""
    import keras

    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(9, 4, mask_zero=True),
            keras.layers.LSTM(5, return_sequences=True),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def sentences(count: int) -> Any:
    random = np.random.default_rng(7)
    x = random.integers(1, 9, (count, 6)).astype(np.int32)
    for row, end in enumerate(random.integers(1, 7, count)):
        x[row, end:] = 0
    return x, random.integers(0, 3, (count, 6))


@pytest.mark.parametrize("drop", [False, True])
def test_masked_sequences(cluster: Cluster, drop: bool) -> None:
    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> Any:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            return {"loss": loss, "weighted_metrics": ["accuracy"]}

        return learned(communicator, words, sentences(18), compiled, sgd, drop=drop)

    same(cluster.call(work, ranks=2))


def test_several_losses_each_divide_by_their_own(cluster: Cluster) -> None:
    """Masks, weights and a plain mean at once; own losses are reported, of batches unequal."""

    def forked() -> Any:
        import keras

        words = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(words)
        outputs = {
            "kinds": keras.layers.Dense(3, name="kinds")(hidden),
            "size": keras.layers.Dense(1, name="size")(keras.layers.GRU(3)(hidden)),
            "plain": keras.layers.Dense(2, name="plain")(
                keras.layers.Flatten()(keras.layers.Embedding(9, 2)(words))
            ),
        }
        return keras.Model(words, outputs)

    def work(communicator: Any) -> Any:
        import keras

        x, y = sentences(14)
        random = np.random.default_rng(3)
        targets = {"kinds": y, "size": x[:, :1] / 9.0, "plain": random.standard_normal((14, 2))}
        shapes = {"kinds": (14, 6), "size": 14, "plain": 14}
        weights = {name: random.uniform(0.1, 2, shape) for name, shape in shapes.items()}

        def compiled() -> Any:
            loss = {
                "kinds": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "size": keras.losses.MeanSquaredError("mean_with_sample_weight"),
                "plain": "mse",
            }
            return {"loss": loss, "loss_weights": {"kinds": 1.0, "size": 0.3, "plain": 2.0}}

        data = (x, targets, weights)
        return learned(communicator, forked, data, compiled, sgd, capacities=[2, 1])

    same(cluster.call(work, ranks=2))


def normalized() -> Any:
    import keras

    inputs = keras.Input((6,))
    left = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(4)(inputs))
    right = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(4)(inputs))
    hidden = keras.layers.Activation("tanh")(keras.layers.Add()([left, right]))
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


@pytest.mark.parametrize("ranks", [2, 3])
def test_synchronized_normalization(cluster: Cluster, ranks: int) -> None:
    """Two layers beside each other, whose gradients come back in no order of their own."""

    def work(communicator: Any) -> Any:
        return learned(
            communicator, normalized, weighted(18), lambda: {"loss": "mse"}, sgd, batch=9
        )

    same(cluster.call(work, ranks=ranks))


def test_synchronized_normalization_of_masked_steps(cluster: Cluster) -> None:
    def masked() -> Any:
        import keras

        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )

    def work(communicator: Any) -> Any:
        import keras

        def compiled() -> Any:
            return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

        return learned(communicator, masked, sentences(14), compiled, sgd)

    same(cluster.call(work, ranks=2))
