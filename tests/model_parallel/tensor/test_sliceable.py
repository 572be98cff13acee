"""Test which layers can be sliced, why others cannot, and which layers form pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras.layers import (
    BatchNormalization,
    Conv2D,
    Dense,
    DepthwiseConv2D,
    Dropout,
    Embedding,
    Flatten,
    MaxPooling2D,
    MultiHeadAttention,
    ReLU,
    SeparableConv2D,
)

from labkit.model_parallel.tensor import LayerGraph


def graph(*layers: Any, shape: tuple[int, ...] = (8, 8, 4)) -> LayerGraph:
    return LayerGraph(keras.Sequential([keras.Input(shape), *layers])._functional)


def attending(width: int = 6, **options: Any) -> tuple[LayerGraph, Any]:
    inputs = keras.Input((5,))
    x = Embedding(9, width, mask_zero=options.pop("mask_zero", False))(inputs)
    scores = options.pop("return_attention_scores", False)
    layer = MultiHeadAttention(3, 2, **options)
    found = layer(x, x, return_attention_scores=scores)
    return LayerGraph(keras.Model(inputs, found)), layer


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Conv2D, {"filters": 4}, ""),
        (Conv2D, {"filters": 4, "groups": 2}, "groups=2"),
        (Conv2D, {"filters": 1}, "filters=1 for 2 slices"),
        (Conv2D, {"filters": 4, "kernel_regularizer": "l2"}, "a regularizer or constraint"),
        (Conv2D, {"filters": 4, "bias_constraint": "non_neg"}, "a regularizer or constraint"),
        (DepthwiseConv2D, {}, "DepthwiseConv2D has no slices"),
        (SeparableConv2D, {"filters": 4}, "SeparableConv2D has no slices"),
    ],
    ids=str,
)
def test_what_stays_whole_says_why(kind: Any, options: dict[str, Any], reason: str) -> None:
    layer = kind(kernel_size=3, **options)
    found = graph(layer, Flatten()).indivisible_reason(layer, 2)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.enable_lora(2), "it has low-rank weights (enable_lora)"),
        (lambda layer: layer.quantize("int8"), "it is quantized to int8"),
    ],
    ids=["lora", "int8"],
)
def test_layers_whose_weights_keras_has_changed_stay_whole(
    change: Callable[[Any], None], reason: str
) -> None:
    dense, other = Dense(4, "relu"), Dense(4)
    found = graph(Flatten(), dense, other)
    change(dense)
    assert (found.indivisible_reason(dense, 2), found.indivisible_reason(other, 2)) == (reason, "")
    attention, layer = attending()
    change(layer.query_dense)
    assert attention.indivisible_reason(layer, 3) == reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"dropout": 0.5}, "dropout=0.5 of attention scores"),
        ({"mask_zero": True}, "its inputs carry masks"),
        ({"return_attention_scores": True}, "it returns its attention scores"),
        ({"kernel_constraint": "non_neg"}, "a regularizer or constraint"),
    ],
    ids=str,
)
def test_attention_that_stays_whole_says_why(options: dict[str, Any], reason: str) -> None:
    found, layer = attending(**options)
    assert found.indivisible_reason(layer, 3).startswith(reason)
    assert bool(found.indivisible_reason(layer, 3)) == bool(reason)


def test_more_slices_than_heads_leave_attention_whole() -> None:
    found, layer = attending()
    assert found.indivisible_reason(layer, 4) == "num_heads=3 for 4 slices"
    assert found.units(layer) == 3


def test_a_layer_that_is_called_twice_stays_whole() -> None:
    tied = Dense(4)
    assert (
        graph(tied, tied, shape=(4,)).indivisible_reason(tied, 2)
        == "the model calls the layer more than once"
    )


@pytest.mark.parametrize(
    ("between", "pairs"),
    [
        (list, True),
        (lambda: [ReLU()], True),
        (lambda: [BatchNormalization(), ReLU(), MaxPooling2D()], True),
        (lambda: [BatchNormalization(axis=1)], False),
        (lambda: [BatchNormalization(renorm=True)], False),
        (lambda: [BatchNormalization(gamma_regularizer="l2")], False),
        (lambda: [Dropout(0.5)], False),
        (lambda: [DepthwiseConv2D(1)], False),
    ],
)
def test_a_pair_has_only_what_goes_channel_by_channel_between(
    between: Callable[[], list[Any]], pairs: bool
) -> None:
    first, *middle, last = Conv2D(4, 3), *between(), Conv2D(4, 3)
    own = [layer for layer in middle if isinstance(layer, BatchNormalization)]
    assert graph(first, *middle, last).behind(first) == ([*own, last] if pairs else [])


def test_layers_of_two_kinds_and_the_end_make_no_pair() -> None:
    dense, image = Dense(4), Conv2D(4, 3)
    found = graph(dense, image)
    assert found.behind(dense) == []
    assert found.behind(image) == []
    assert found.last(image)
    assert not found.last(dense)


def test_a_mask_at_the_end_is_seen() -> None:
    inputs = keras.Input((5,))
    words = Embedding(9, 4, mask_zero=True)(inputs)
    assert LayerGraph(keras.Model(inputs, Dense(3)(words))).masked
    assert not LayerGraph(keras.Model(inputs, Dense(3)(inputs))).masked
