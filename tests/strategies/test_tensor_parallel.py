"""Test a model in slices: it learns as one process does, and sends what the formula says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import Cluster, Experiment, InvalidInput
from labkit.datasets import available
from labkit.figures import layer_traffic
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


def low_rank() -> Any:
    """Return a model in which an unsliced layer has low-rank weights."""
    model = mlp()
    model.layers[1].enable_lora(2)
    return model


def low_rank_only() -> Any:
    model = mlp()
    for layer in model.layers:
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
    return model


def lone() -> Any:
    """Return a model with softmax and normalization, in which no two layers form a pair."""
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


def normalised() -> Any:
    """Return a model with a pair of convolutions, and a normalization per channel between them."""
    import keras
    from keras.layers import BatchNormalization, Conv2D, Dense, Flatten, MaxPooling2D, ReLU

    layers = [
        Conv2D(5, 3, padding="same"),
        BatchNormalization(),
        ReLU(),
        MaxPooling2D(),
        Conv2D(6, 3, activation="relu"),
        Flatten(),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, Dense(10)])


def codes() -> Any:
    """Return sequences of six codes out of eleven, and the code that follows each."""
    found = np.random.default_rng(0).integers(0, 11, (90, 7)).astype("int32")
    return found[:, :-1], found[:, 1:]


def text(of: Any) -> Any:
    """Compile a model of codes with the loss of its task, and return it.

    It uses SGD, because Adam in one process squares each part of a word's gradient instead of their
    sum.
    """
    from labkit import models

    of.compile("sgd", models.task_loss("next_character"), metrics=["accuracy"])
    of.optimizer.learning_rate = 0.3
    return of


def transformer() -> Any:
    from labkit import models
    from labkit.datasets import Shapes

    options = {"layers": 1, "width": 12, "heads": 3, "feed_forward": 10}
    return text(models.build("transformer", Shapes((6,), 11, "next_character"), **options))


def crossed() -> Any:
    """Return a model with attention from one half of a sequence to the other, masked or grouped."""
    import keras
    from keras.layers import (
        Add,
        Concatenate,
        Dense,
        Embedding,
        GroupQueryAttention,
        LayerNormalization,
        MultiHeadAttention,
    )

    inputs = keras.Input((6,), dtype="int32")
    x = Embedding(11, 8)(inputs)
    first, second = x[:, :4], LayerNormalization()(x[:, 2:])
    mask = keras.ops.not_equal(inputs[:, 2:], 3)[:, None, :]
    heads = MultiHeadAttention(3, 4, value_dim=5, output_shape=8, use_bias=False, name="heads")
    y = Add()([first, heads(first, second, attention_mask=mask)])
    y = GroupQueryAttention(3, 6, 3, name="groups")(y, second, key=Dense(8)(second))
    return text(keras.Model(inputs, Dense(11)(Concatenate(axis=1)([y, x[:, 4:]]))))


def masked() -> Any:
    """Return a model whose mask attention and the loss use, and which dense layers pass on."""
    import keras
    from keras.layers import Add, Dense, Embedding, MultiHeadAttention

    inputs = keras.Input((6,), dtype="int32")
    x = Embedding(11, 8, mask_zero=True)(inputs)
    inner = Dense(8)(Dense(7, "relu")(x))
    x = Add()([inner, Dense(8)(x), MultiHeadAttention(3, 4)(x, x)])
    return text(keras.Model(inputs, Dense(11)(x)))


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
    from labkit.worker import equivalence
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    return dict(equivalence.verify(experiment, communicator, read(experiment, communicator)))


TEXT = {"dataset": codes(), "dataset_options": {}}
SOFTMAX = {"loss": "sparse_categorical_crossentropy"}


@pytest.mark.battery(1, 4)
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (mlp, {"workers": 4, "optimizer": "adam"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    mlp,
                    {
                        "workers": 4,
                        "strategy": TensorParallel(tensor_parallel_size=2),
                        "batch_size": 31,
                    },
                ),
                (mlp, {"workers": 3, "strategy": TensorParallel(algorithm="ring")}),
                (lone, {"workers": 3, **SOFTMAX}),
                (low_rank, {}),
                (skips, {"workers": 4}),
                (words, {"workers": 4}),
                (images, {"workers": 4, "strategy": TensorParallel(tensor_parallel_size=2)}),
                (
                    transformer,
                    {"workers": 4, "strategy": TensorParallel(tensor_parallel_size=2), **TEXT},
                ),
                (transformer, {"workers": 3, **TEXT}),
                (crossed, TEXT),
                (masked, TEXT),
            )
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value.get("workers", 2)),
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


@pytest.mark.slow
def test_normalisation_between_a_pair_is_cut_with_it(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL | {"model": normalised})
    verdict = cluster.call(verify, experiment, str(Path.cwd() / "cache"), ranks=2)[0]
    assert verdict["verdict"] == "passed", verdict
    assert verdict["max_abs_difference"] < 1e-10


def first_step(communicator: Any, experiment: Experiment) -> Any:
    """Return the bytes each layer sent in one step, and the losses by slices and by the whole."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

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
    # The input needs no gradient, and each sample sends three numbers for the scores.
    assert (told["stem"]["forward_bytes"], told["stem"]["backward_bytes"]) == (values / 2, 0)
    assert (rows[-1]["forward_bytes"], rows[-1]["backward_bytes"]) == (3 * 30 * 8, values)


def test_attention_sends_one_sum_forward_and_one_backward(cluster: Cluster) -> None:
    experiment = Experiment(**SMALL | TEXT | {"model": transformer, "precision": "float64"})
    rows, loss, whole = cluster.call(first_step, experiment, ranks=2)[0]
    assert loss == pytest.approx(whole, rel=1e-12)
    sent = {row["layer"]: (row["forward_bytes"], row["backward_bytes"]) for row in rows}
    n = 30 * 6 * 12 * 8  # bytes of the batch between blocks
    assert {name: both for name, both in sent.items() if any(both)} == {
        "words": (n, 0),
        "positions": (n / 30, 0),
        "attention_1": (n, n),
        "feed_forward_in_1": (0, n),
        "feed_forward_out_1": (n, 0),
        "scores": (3 * n / 12, n),
    }
    held = {row["layer"]: (row["weights_bytes"], row["whole_weights_bytes"]) for row in rows}
    # These are the weights of one head and of three heads.
    one, all_three = (12 + 1) * 4 * 3 + 4 * 12, 3 * ((12 + 1) * 4 * 3 + 4 * 12)
    # Both slices hold the bias.
    assert held["attention_1"] == (8 * (one + 12), 8 * (all_three + 12))


def alone_and_together(communicator: Any, experiment: Experiment) -> Any:
    """Return predictions by the whole model and by slices, and the model's number of values."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(experiment, communicator, read(experiment, communicator))
    x, y = next(iter(session.feed.train))[:2]
    sliced, step = experiment.strategy.start(session)
    found = [(session.model(x).numpy(), sliced.predict(x).numpy())]
    numbers = []
    for _ in range(2):
        step(x, y, None)
        numbers.append(sum(variable.numpy().size for variable in session.model.variables))
        sliced.collect()
        numbers.append(sum(variable.numpy().size for variable in session.model.variables))
        found.append((session.model(x).numpy(), sliced.predict(x).numpy()))
    return found, numbers


def test_slices_predict_what_the_whole_model_does_which_is_away_while_they_train(
    cluster: Cluster,
) -> None:
    experiment = Experiment(**SMALL | {"model": skips, "precision": "float64"})
    for found, numbers in cluster.call(alone_and_together, experiment, ranks=2):
        for whole, joined in found:
            np.testing.assert_allclose(joined, whole, atol=1e-12)
        assert not np.allclose(found[0][0], found[-1][0])
        shared = 2 * (6 + 6 + 6)  # parameters of norms, and biases that are added to sums
        cut = (64 + 1) * 6 + 2 * ((6 + 1) * 9 + 9 * 6) + (6 + 1) * 10
        assert numbers == [shared, shared + cut] * 2


def test_the_record_has_the_traffic_of_every_layer(cluster: Cluster) -> None:
    fields = {"batch_size": 25, "epochs": 2, "verify": False}
    ring = TensorParallel(algorithm="ring")
    run = cluster.run(Experiment(**SMALL | fields | {"model": skips, "strategy": ring}))
    table = run.layers.set_index(["layer", "rank"])
    assert sorted(run.layers["rank"].unique()) == [0, 1]
    n = 25 * 6 * 4
    pairs = run.layers[run.layers["slices"].isin(["outputs", "inputs"])]
    assert set(pairs["forward_bytes"] + pairs["backward_bytes"]) == {n}
    assert set(pairs["forward_wire_bytes"] + pairs["backward_wire_bytes"]) == {n}  # 2 (2 - 1) / 2
    assert table.loc[("stem", 0), "slices"] == "outputs, gathered"
    assert table.loc[("stem", 0), "whole_weights_bytes"] == (64 + 1) * 6 * 4
    assert table.loc[("stem", 0), "weights_bytes"] == (64 + 1) * 3 * 4
    whole = run.layers[run.layers["slices"] == "whole"]
    assert set(whole["why"]) == {"LayerNormalization has no slices"}


UNITS = r"dense\S*: units=1 for 2 slices; dense\S*: a regularizer .*"


@pytest.mark.parametrize(
    ("model", "why"), [(narrow, UNITS), (low_rank_only, r".*it has low-rank weights .*")]
)
def test_what_cannot_be_cut_is_said(cluster: Cluster, model: Any, why: str) -> None:
    experiment = Experiment(**SMALL | {"model": model})
    sentence = rf"no layer can be divided into 2 slices \({why}\); give tensor_parallel_size=1"
    with pytest.raises(Exception, match=sentence):
        cluster.call(first_step, experiment, ranks=2)


@pytest.mark.slow
@pytest.mark.skipif(bool(available("shakespeare")), reason="the text is not here")
def test_a_transformer_is_cut_by_its_name(cluster: Cluster) -> None:
    experiment = Experiment(
        model="transformer",
        model_options={"layers": 1, "width": 16, "heads": 4, "feed_forward": 32},
        dataset="shakespeare",
        dataset_options={"rows": 64, "test_rows": 16, "sequence_length": 16},
        strategy=TensorParallel(tensor_parallel_size=2),
        workers=2,
        batch_size=16,
        learning_rate=0.5,
    )
    run = cluster.run(experiment)
    assert run.metrics["equivalence"]["verdict"] == "passed"
    assert run.metrics["equivalence"]["max_abs_difference"] < 1e-10
    assert set(run.layers["slices"]) == {"words", "whole", "heads", "outputs", "inputs", "scores"}
    assert run.model()(np.zeros((1, 16), "int32")).shape == (1, 16, 65)
    assert "attention_1 (heads): 16 KiB forward, 16 KiB backward" in layer_traffic(run).alt


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"workers": 4, "strategy": TensorParallel(tensor_parallel_size=3)},
            "tensor_parallel_size=3 does not .*: 1, 2, 4",
        ),
        ({"batch_weights": (1, 2)}, "slices of a model work on the same rows"),
        ({"input_mode": "scatter"}, "slices of a model work on the same rows"),
        ({"optimizer_options": {"clipnorm": 1.0}}, "clipnorm=1.0 needs .*; use clipvalue"),
        ({"optimizer": "lamb"}, "optimizer='lamb' needs whole variables"),
        (
            {"model": "linear", "workers": 12},
            "tensor_parallel_size=12 exceeds the 10 units of the widest layer; .*: 1, 2, 3, 4, 6$",
        ),
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

    from labkit.model_parallel.tensor import Link, cross_entropy

    random = np.random.default_rng(0)
    # Without subtracting the maximum, exp would overflow.
    scores = tf.constant(random.standard_normal((3, 4, 11)) * 300)
    y = tf.constant(random.integers(0, 11, (3, 4)))
    link = Link(communicator, "mpi", 0)
    with tf.GradientTape() as tape:
        own = scores[..., link.local_range(11)]
        tape.watch(own)
        loss = cross_entropy(link, 11, y, own)
    with tf.GradientTape() as whole:
        whole.watch(scores)
        expected = tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores)
    right = whole.gradient(expected, scores)[..., link.local_range(11)]
    return loss - expected, tape.gradient(loss, own) - right


def test_the_softmax_of_a_cut_vocabulary_is_the_whole_one(cluster: Cluster) -> None:
    for loss, gradient in cluster.call(softmax):
        np.testing.assert_allclose(loss, 0, atol=1e-10)
        np.testing.assert_allclose(gradient, 0, atol=1e-12)
