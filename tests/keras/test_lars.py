"""Test LARS against NumPy step by step, with zero weights, by name, and loaded from a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import labkit as lk
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput
from labkit.keras import LARS
from labkit.strategies.validation import refuse_norms

SHAPES = [(6, 5), (5,), (3, 2, 4), ()]
OPTIONS: dict[str, Any] = {"momentum": 0.8, "trust_coefficient": 0.02, "weight_decay": 0.03}


def replayed(
    weights: list[np.ndarray],
    gradients: list[list[np.ndarray]],
    rate: float,
    exclude_1d: bool,
    ratio: str = "paper",
) -> list[np.ndarray]:
    """Return the weights by the paper's LARS rule, or by optax's, which decays before the norm."""
    m, trust, decay = (OPTIONS[n] for n in ("momentum", "trust_coefficient", "weight_decay"))
    found = [weight.copy() for weight in weights]
    velocities = [np.zeros_like(weight) for weight in weights]
    for step in gradients:
        for number, g in enumerate(step):
            w, scale = found[number], 1.0
            if w.ndim > 1 or not exclude_1d:
                size = np.sqrt(np.sum(w * w))
                apart = np.sqrt(np.sum(g * g)) + decay * size
                g = g + decay * w
                scale = trust * size / (apart if ratio == "paper" else np.sqrt(np.sum(g * g)))
            velocities[number] = m * velocities[number] + rate * scale * g
            found[number] = w - velocities[number]
    return found


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Compute in float64, because Keras's default float type would halve the digits of rates."""
    # Set the dtype policy too: Keras would otherwise make it from this type at its first use, and
    # keep it.
    for name in ("float64", "float32"):
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)
        if name == "float64":
            yield


def variables(values: list[np.ndarray]) -> list[keras.Variable]:
    return [keras.Variable(value, dtype="float64") for value in values]


@pytest.mark.parametrize("ratio", ["paper", "optax"])
@pytest.mark.parametrize("exclude_1d", [True, False])
def test_thirty_steps_are_those_of_numpy(exclude_1d: bool, ratio: Any) -> None:
    random = np.random.default_rng(3)
    weights = [random.standard_normal(shape) for shape in SHAPES]
    gradients = [[random.standard_normal(shape) for shape in SHAPES] for _ in range(30)]
    ours = variables(weights)
    optimizer = LARS(0.4, exclude_1d=exclude_1d, trust_ratio=ratio, **OPTIONS)
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(g, "float64") for g in step], ours)
    theirs = replayed(weights, gradients, 0.4, exclude_1d, ratio)
    apart = [np.abs(one.numpy() - other).max() for one, other in zip(ours, theirs, strict=True)]
    assert max(apart) <= 1e-12
    moved = [np.abs(one - other).max() for one, other in zip(theirs, weights, strict=True)]
    assert min(moved) > 1e-3  # otherwise any rule would pass


def test_weights_that_are_all_zero_take_plain_steps_and_no_gradient_is_no_step() -> None:
    zero, still = variables([np.zeros((2, 2)), np.full((2, 2), 3.0)])
    gradients = [keras.ops.ones((2, 2), "float64"), keras.ops.zeros((2, 2), "float64")]
    LARS(0.1, momentum=0.0).apply(gradients, [zero, still])
    np.testing.assert_allclose(zero.numpy(), -0.1)
    np.testing.assert_array_equal(still.numpy(), 3.0)


def test_without_gradients_decay_alone_shrinks_the_weights_by_the_trust_coefficient() -> None:
    (own,) = variables([np.full((2, 2), 3.0)])
    LARS(1.0, momentum=0.0, trust_coefficient=0.01, weight_decay=0.5).apply(
        [keras.ops.zeros((2, 2), "float64")], [own]
    )
    np.testing.assert_allclose(own.numpy(), 3.0 * (1 - 0.01))  # τ ‖w‖ / (β ‖w‖) times β w


def test_what_is_excluded_from_decay_keeps_its_trust_ratio() -> None:
    kernel, other = variables([np.full((2, 2), 3.0)] * 2)
    optimizer = LARS(1.0, momentum=0.0, trust_coefficient=0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([other])
    optimizer.apply([keras.ops.ones((2, 2), "float64")] * 2, [kernel, other])
    np.testing.assert_allclose(other.numpy(), 3.0 - 0.01 * 6 / 2)
    np.testing.assert_allclose(kernel.numpy(), 3.0 - 0.01 * 6 / (2 + 0.5 * 6) * (1 + 0.5 * 3))


def test_rows_of_an_embedding_are_a_dense_gradient() -> None:
    import tensorflow as tf

    dense, rows = variables([np.arange(1.0, 7.0).reshape(3, 2)] * 2)
    given = tf.IndexedSlices(tf.ones((1, 2), tf.float64), tf.constant([1]), tf.constant([3, 2]))
    LARS(0.5).apply([tf.convert_to_tensor(given)], [dense])
    LARS(0.5).apply([given], [rows])
    np.testing.assert_array_equal(rows.numpy(), dense.numpy())


def test_its_configuration_goes_round_through_keras() -> None:
    schedule = keras.optimizers.schedules.CosineDecay(2.0, 10)
    optimizer = LARS(schedule, exclude_1d=False, clipnorm=1.0, **OPTIONS)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is LARS
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"trust_coefficient": 0.0}])
def test_numbers_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="give a momentum from 0 to below 1"):
        LARS(**wrong)


def test_it_looks_at_whole_variables() -> None:
    with pytest.raises(InvalidInput, match="optimizer='lars' needs whole variables"):
        refuse_norms("lars", {})


@pytest.mark.slow
def test_by_name_ranks_learn_what_one_process_does(cluster: Cluster) -> None:
    asked = lk.Experiment(
        model_options={"widths": [16]},
        optimizer="lars",
        optimizer_options={"trust_coefficient": 0.1},
        learning_rate_scaling="linear",
        warmup_epochs=0.5,
        workers=2,
        steps_per_epoch=4,
    )
    run = cluster.run(asked, show=False)
    assert run.metrics["equivalence"]["verdict"] == "passed", run.metrics["equivalence"]
    opened = run.model().optimizer
    assert (type(opened), opened.trust_coefficient) == (LARS, 0.1)
    assert float(opened.learning_rate) == 2.0  # scaled for two workers


@pytest.mark.slow
def test_a_model_that_ranks_have_trained_is_saved_with_it(cluster: Cluster, tmp_path: Path) -> None:
    def work(communicator: Any, path: str) -> None:
        import keras

        from labkit import keras as lkk

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = lkk.DistributedOptimizer(lkk.LARS(0.3), communicator)
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(np.ones((4, 3)), np.ones((4, 2)), callbacks=lkk.callbacks(communicator))
        if communicator.rank == 0:
            model.save(path)

    path = tmp_path / "model.keras"
    cluster.call(work, str(path), ranks=2)
    script = f"""
import keras
from labkit.keras import LARS
optimizer = keras.models.load_model({str(path)!r}).optimizer
assert type(optimizer) is LARS and int(optimizer.iterations) == 1, type(optimizer)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
