"""Test that a server's weights change as under Keras's own optimizer, at any share of the rate."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from labkit.programs import placed
from labkit.programs.replica import Shard

SHAPES = [(6, 4), (4,)]
WEIGHTS = np.random.default_rng(0).normal(size=28).astype("float32")
GRADIENT = np.random.default_rng(1).normal(size=28).astype("float32")


def variables() -> list[Any]:
    """Return a weight matrix and a bias."""
    kernel, bias = WEIGHTS[:24].reshape(6, 4), WEIGHTS[24:]
    return [keras.Variable(kernel, name="kernel"), keras.Variable(bias, name="bias")]


def plainly(optimizer: Any, rates: list[float]) -> Any:
    """Return the weights after updates by the optimizer alone, each at a share of its rate."""
    own = variables()
    optimizer.build(own)
    whole = float(optimizer.learning_rate)
    for part in rates:
        optimizer.learning_rate = whole * part
        optimizer.apply([GRADIENT[:24].reshape(6, 4), GRADIENT[24:]], own)
    return np.concatenate([each.numpy().reshape(-1) for each in own])


@pytest.mark.battery(3, 3)
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "muon", "schedulefreeadamw"])
@pytest.mark.parametrize("rates", [[1.0, 1.0, 1.0], [0.5, 1.0, 0.125]], ids=["whole", "parts"])
def test_any_optimizer_does_what_it_does_alone(name: str, rates: list[float]) -> None:
    (part,) = placed(SHAPES, 1, "round_robin")
    shard = Shard(part, WEIGHTS, keras.optimizers.get(name), variables())
    found = [shard.update(GRADIENT, rate) for rate in rates][-1]
    expected = plainly(keras.optimizers.get(name), rates)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert np.abs(found - WEIGHTS).max() > 1e-5


@pytest.mark.parametrize("name", ["adam", "nadam", "adagrad", "schedulefreeadamw"])
def test_who_forgets_takes_the_next_step_as_the_first(name: str) -> None:
    (part,) = placed(SHAPES, 1, "round_robin")
    shard = Shard(part, WEIGHTS, keras.optimizers.get(name), variables())
    first, *_ = [shard.update(GRADIENT) for _ in range(3)]
    shard.become(WEIGHTS)
    shard.forget(keras.optimizers.get(name))
    np.testing.assert_array_equal(shard.update(GRADIENT), first)


def test_who_forgets_keeps_the_place_in_a_schedule() -> None:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    (part,) = placed(SHAPES, 1, "round_robin")
    shard = Shard(part, WEIGHTS, keras.optimizers.Adam(decay), variables())
    shard.update(GRADIENT)
    shard.update(GRADIENT)
    shard.become(WEIGHTS)
    shard.forget(keras.optimizers.Adam(decay))
    expected = plainly(keras.optimizers.Adam(0.1 * 0.25), [1.0])
    np.testing.assert_allclose(shard.update(GRADIENT), expected, rtol=0, atol=1e-6)
