"""Test that weights of stages that other ranks train are freed, even if set in between."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from labkit.model_parallel.memory import unique_nbytes
from labkit.model_parallel.stages import split_model
from labkit.model_parallel.weights import WholeWeights


class Sliced:
    """A sliced layer that records the arguments of calls to release it."""

    def __init__(self) -> None:
        self.looks: list[bool] = []

    def release(self, look: bool) -> None:
        self.looks.append(look)


def test_weights_of_others_that_someone_has_set_are_freed_again() -> None:
    layers = [keras.layers.Dense(3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    first, second = split_model(model, [0, 1, 2])
    everyone: Any = None  # no weights are collected from other ranks
    sliced: Any = Sliced()
    whole = WholeWeights(model, {0: [first], 1: [second]}, 0, everyone, [sliced])
    own, given = unique_nbytes(first.variables), model.get_weights()
    assert unique_nbytes(model.variables) > own
    whole.release(look=False)
    assert unique_nbytes(model.variables) == own
    model.set_weights(given)
    whole.release(look=False)
    assert unique_nbytes(model.variables) > own
    whole.release(look=True)
    assert unique_nbytes(model.variables) == own
    assert sliced.looks == [False, False, True]
    np.testing.assert_array_equal(first.get_weights()[0], given[0])
