"""Test that labkit names every deviation from one process, and names none where none exists."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from labkit.keras import LARS
from labkit.keras.replica_consistency import embedding_difference

KINDS = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"),
    *("Adafactor", "Lamb", "LARS"),
)
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("SGD", {"momentum": 0.9}),
    *(("SGD", {name: 0.01}) for name in ("clipnorm", "global_clipnorm", "clipvalue")),
    *((kind, {"gradient_accumulation_steps": 2}) for kind in ("Adam", "Ftrl")),
]


def made(kind: str, options: dict[str, Any]) -> Any:
    return (LARS if kind == "LARS" else getattr(keras.optimizers, kind))(0.05, **options)


def after_steps(optimizer: Any, dense: bool) -> np.ndarray:
    """Return an embedding table after two steps in which one word occurs twice."""
    table = keras.Variable(np.linspace(-1, 1, 12).reshape(6, 2), dtype="float32")
    values = tf.constant([[0.3, 0.1], [-0.2, 0.4], [0.1, 0.1]])
    rows = tf.IndexedSlices(values, tf.constant([1, 1, 2]), tf.constant([6, 2]))
    for _ in range(2):
        optimizer.apply([tf.convert_to_tensor(rows) if dense else rows], [table])
    return np.asarray(table.numpy())


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_an_embedding_is_named_where_the_optimizer_does_more_than_add(
    kind: str, options: dict[str, Any]
) -> None:
    one, other = (after_steps(made(kind, options), dense) for dense in (False, True))
    differs = bool(np.abs(one - other).max() > 1e-5)
    layers = [keras.layers.Embedding(6, 2, name="words"), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(made(kind, options), "mse")
    reason = embedding_difference(model)
    assert (reason is not None) == differs
    assert reason is None or "'words' (Embedding): if a word occurs several times" in reason


def test_models_without_words_and_dense_gradients_are_not_named() -> None:
    layers = [keras.layers.Embedding(6, 2, embeddings_regularizer="l2"), keras.layers.Flatten()]
    for inner in (layers, [keras.layers.Dense(3)]):
        model = keras.Sequential([keras.Input((4,)), *inner])
        model.compile("adam", "mse")
        assert embedding_difference(model) is None
