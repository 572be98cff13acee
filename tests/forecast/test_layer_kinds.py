"""Test that forecasts slice layers as ranks do, from the recorded kinds of layers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

from labkit.bench.calibration_runs.model import kind
from labkit.bench.calibration_runs.model import layers as costs_of
from labkit.communicator.clock import WALL
from labkit.forecast.slices import DIVIDED, sliced
from labkit.model_parallel.functional import functional_of
from labkit.model_parallel.tensor import SLICES, LayerGraph


def images() -> list[Any]:
    return [
        *(keras.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D()),
        *(layers.Conv2D(4, 2), layers.Flatten(), layers.Dense(6), layers.BatchNormalization()),
        *(layers.ReLU(), layers.Dense(6), layers.Dropout(0.1), layers.Dense(3)),
    ]


def words() -> list[Any]:
    return [
        *(keras.Input((6,), dtype="int32"), layers.Embedding(9, 4), layers.Conv1D(4, 2)),
        *(layers.LSTM(4), layers.Dense(5), layers.LayerNormalization(), layers.Dense(3)),
    ]


@pytest.mark.parametrize("made", [images, words])
def test_the_same_layers_are_cut_and_the_same_make_pairs(made: Callable[[], list[Any]]) -> None:
    model = keras.Sequential(made())
    found = costs_of(model, 2, WALL)
    assert [each.kind for each in found] == [type(each).__name__ for each in model.layers]
    graph = LayerGraph(functional_of(model))
    shares = {cost.name: cut for cost, cut in zip(found, sliced(found, 2, False), strict=True)}
    behind: set[str] = set()
    for layer in graph.layers:
        own = shares[layer.name]
        pair = [] if layer.name in behind else [each.name for each in graph.behind(layer)]
        behind |= {*pair}
        if pair:
            assert (own.share, own.total, own.gather) == (1 / 2, 0, 0)
            assert shares[pair[-1]].total > 0
        elif layer.name not in behind:
            assert (own.share < 1) == (graph.indivisible_reason(layer, 2) == "")
            assert (own.gather > 0) == (own.share < 1 and type(layer) is not layers.Embedding)


def test_all_that_ranks_cut_has_a_kind_here() -> None:
    assert set(DIVIDED) == {each.__name__ for each in SLICES}


def test_a_block_is_of_the_kind_of_all_that_train_in_it() -> None:
    x = keras.Input((4,))
    two = keras.Model(x, layers.Add()([x, layers.Dense(4)(layers.Dense(4)(x))]))
    mixed = keras.Model(x, layers.Add()([x, layers.Dense(4)(layers.LayerNormalization()(x))]))
    assert (kind(two), kind(mixed)) == ("Dense", "Functional")
    assert kind(keras.Model(x, layers.ReLU()(x))) == "ReLU"


def test_a_frozen_layer_counts_as_whole() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, trainable=False), layers.Dense(6)])
    frozen, trained = sliced(costs_of(model, 2, WALL), 2, shares_scores=False)
    assert (frozen.share, trained.share) == (1, 1 / 2)
