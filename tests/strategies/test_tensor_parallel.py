"""A model in vertical slices learns what one process learns, and sends what the formula says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Experiment, InvalidInput
from labkit.strategies import TensorParallel

SMALL = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "batch_size": 30,
    "workers": 2,
    "strategy": TensorParallel(),
}


def mlp() -> Any:
    import keras
    from keras.layers import Activation, Dense, Flatten

    layers = [Flatten(), Dense(7, "relu"), Dense(5), Activation("tanh"), Dense(6, "gelu")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, Dense(10)])


def lone() -> Any:
    """Softmax at the end and normalisation between: nothing makes a pair."""
    import keras
    from keras.layers import Dense, Flatten, LayerNormalization

    layers = [Flatten(), Dense(7, "relu"), LayerNormalization(), Dense(10, "softmax")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def skips() -> Any:
    import keras
    from keras.layers import Add, Dense, Flatten, LayerNormalization

    inputs = keras.Input((8, 8, 1))
    x = Dense(6, name="stem")(Flatten()(inputs))
    for _ in range(2):
        inner = Dense(6)(Dense(9, "gelu")(LayerNormalization()(x)))
        x = Add()([x, inner])
    return keras.Model(inputs, Dense(10)(x))


def images() -> Any:
    import keras
    from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D

    layers = [
        Conv2D(5, 3, activation="relu", padding="same"),
        MaxPooling2D(),
        Conv2D(6, 3, activation="relu", strides=2),
        Conv2D(4, 1),
        Flatten(),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, Dense(10)])


def words() -> Any:
    import keras
    from keras.layers import Dense, Embedding, GlobalAveragePooling1D, Reshape

    layers = [Reshape((64,)), Embedding(17, 4), GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, Dense(10)])


def narrow() -> Any:
    import keras
    from keras.layers import Dense, Flatten

    layers = [Flatten(), Dense(1), Dense(10, kernel_regularizer="l2")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def verify(communicator: Any, experiment: Experiment, cache: str) -> dict[str, Any]:
    from labkit import gate
    from labkit.feed import read

    os.environ["LABKIT_CACHE"] = cache
    return dict(gate.verify(experiment, communicator, read(experiment, communicator)))


SOFTMAX = {"loss": "sparse_categorical_crossentropy"}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (mlp, {"workers": 4, "optimizer": "adam"}),
        (images, {"workers": 4, "strategy": TensorParallel(slices=2)}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (mlp, {"workers": 4, "strategy": TensorParallel(slices=2), "batch_size": 31}),
                (mlp, {"workers": 3, "strategy": TensorParallel(algorithm="ring")}),
                (lone, {"workers": 3, **SOFTMAX}),
                (skips, {"workers": 4}),
                (words, {"workers": 4}),
            )
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_twenty_steps_on_slices_are_those_of_one_process(
    cluster: Cluster, model: Any, fields: dict[str, Any]
) -> None:
    experiment = Experiment(**SMALL | {"model": model, "model_options": {}} | fields)
    cache = str(Path.cwd() / "cache")
    for verdict in cluster.call(verify, experiment, cache, ranks=experiment.workers):
        assert verdict["verdict"] == "passed", verdict
        assert verdict["max_abs_difference"] < 1e-10
        assert "20 steps" in verdict["reason"]


def first_step(communicator: Any, experiment: Experiment) -> Any:
    """What each layer sent in one step, and the loss on slices and whole."""
    from labkit.feed import read
    from labkit.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    x, y = next(iter(session.feed.train))[:2]
    sliced, step = experiment.strategy.start(session)
    whole = float(session.model._compile_loss(y, session.model(x)))
    loss = step(x, y, None)
    return sliced.describe(), loss, whole


def test_a_pair_of_dense_layers_sends_one_sum_forward_and_one_backward(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL | {"model": skips, "precision": "float64"})
    rows, loss, whole = cluster.call(first_step, experiment, ranks=2)[0]
    assert loss == pytest.approx(whole, rel=1e-12)
    told = {row["layer"]: row for row in rows}
    kinds = [row["slices"] for row in rows]
    pair = ["whole", "outputs", "inputs"]
    assert kinds == ["outputs, gathered", *pair, *pair, "scores"]
    values = 30 * 6 * 8  # bytes of the batch between pairs
    for row in rows:
        if row["slices"] == "outputs":
            assert (row["forward_bytes"], row["backward_bytes"]) == (0, values)
        if row["slices"] == "inputs":
            assert (row["forward_bytes"], row["backward_bytes"]) == (values, 0)
            assert row["forward_wire_bytes"] == 2 * (2 - 1) / 2 * values
    # Nothing is asked for the gradient of the input; scores send three numbers a sample.
    assert (told["stem"]["forward_bytes"], told["stem"]["backward_bytes"]) == (values / 2, 0)
    assert (rows[-1]["forward_bytes"], rows[-1]["backward_bytes"]) == (3 * 30 * 8, values)


def test_what_cannot_be_cut_is_said(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL | {"model": narrow})
    with pytest.raises(Exception, match="no layer can be cut into 2 slices: a Dense, Conv2D"):
        cluster.call(first_step, experiment, ranks=2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"workers": 4, "strategy": TensorParallel(slices=3)}, "slices=3 does not .*: 1, 2, 4"),
        ({"capacities": (1, 2)}, "slices of a model work on the same rows"),
        ({"feed": "scatter"}, "slices of a model work on the same rows"),
        ({"optimizer_options": {"clipnorm": 1.0}}, "clipnorm=1.0 needs .*; use clipvalue"),
        ({"optimizer": "lamb"}, "optimizer='lamb' looks at whole variables"),
        (
            {"network": "1GbE", "strategy": TensorParallel(algorithm="mpi")},
            "cannot run on the emulated network",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_ranks_start(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Experiment(**SMALL | fields)


def test_an_algorithm_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="algorithm='magic' is not known; allowed: auto, mpi"):
        TensorParallel(algorithm="magic")


def softmax(communicator: Any) -> Any:
    import tensorflow as tf

    from labkit.slices import Link, cross_entropy

    random = np.random.default_rng(0)
    scores = tf.constant(random.standard_normal((3, 4, 11)) * 300)  # overflow without the maximum
    y = tf.constant(random.integers(0, 11, (3, 4)))
    link = Link(communicator, "mpi", 0)
    with tf.GradientTape() as tape:
        own = scores[..., link.own(11)]
        tape.watch(own)
        loss = cross_entropy(link, 11, y, own)
    with tf.GradientTape() as whole:
        whole.watch(scores)
        expected = tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores)
    right = whole.gradient(expected, scores)[..., link.own(11)]
    return loss - expected, tape.gradient(loss, own) - right


def test_the_softmax_of_a_cut_vocabulary_is_the_whole_one(cluster: Cluster) -> None:
    for loss, gradient in cluster.call(softmax):
        np.testing.assert_allclose(loss, 0, atol=1e-10)
        np.testing.assert_allclose(gradient, 0, atol=1e-12)
