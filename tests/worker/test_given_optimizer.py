"""Test that a compiled model's optimizer is used as it is, or refused in one sentence."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest

import labkit as lk
from labkit.cluster import Cluster, RankError
from labkit.common.errors import InvalidInput

BASE: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "batch_size": 30,
    "workers": 2,
}


def net(exclude: str, taken: int = 0) -> Any:
    """Return a model with clipped gradients, so that weight decay alone changes weights."""
    import keras
    import numpy as np

    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10, name="last")]
    )
    model.layers[-1].bias.assign(np.ones(10))
    optimizer = keras.optimizers.SGD(0.1, clipvalue=1e-9)
    optimizer.weight_decay = 0.5
    if exclude == "name":
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    if exclude == "variable":
        optimizer.exclude_from_weight_decay(var_list=[model.layers[-1].bias])
    optimizer.iterations.assign(taken)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("exclude", "strategy", "clock"),
    [
        ("name", lk.AllReduce(), "wall"),
        ("variable", lk.AllReduce(), "wall"),
        ("name", lk.ParameterServer(), "virtual"),
    ],
)
def test_a_bias_that_is_excluded_from_decay_stays(
    cluster: Cluster, exclude: str, strategy: Any, clock: Any
) -> None:
    asked = lk.Experiment(
        model=lambda: net(exclude), strategy=strategy, clock=clock, epochs=2, **BASE
    )
    run = cluster.run(asked, show=False)
    kernel, bias = run.model().get_weights()
    np.testing.assert_allclose(bias, 1.0, atol=1e-6)
    assert run.metrics["equivalence"]["verdict"] == "passed"
    assert np.abs(kernel).max() < 0.9 * np.abs(net("").get_weights()[0]).max()


@pytest.mark.parametrize(
    ("exclude", "taken", "sentence"),
    [
        ("variable", 0, r"exclude_from_weight_decay\(var_list=…\) refers to variables"),
        ("", 5, "the optimizer of the compiled model has taken 5 steps"),
    ],
)
def test_state_that_has_no_place_in_a_strategy_is_one_sentence(
    cluster: Cluster, exclude: str, taken: int, sentence: str
) -> None:
    asked = lk.Experiment(
        model=lambda: net(exclude, taken), strategy=lk.ParameterServer(), clock="virtual", **BASE
    )
    with pytest.raises((RankError, InvalidInput), match=sentence):
        cluster.run(asked, show=False)


def test_a_recipe_takes_attributes_to_another_process() -> None:
    from labkit.keras import Recipe

    optimizer = keras.optimizers.LossScaleOptimizer(net("name").optimizer)
    made = pickle.loads(cloudpickle.dumps(Recipe.of(optimizer))).new().inner_optimizer
    assert made.weight_decay == 0.5
    assert made._exclude_from_weight_decay_pattern.pattern == "bias"
    with pytest.raises(InvalidInput, match="var_list"):
        Recipe.of(net("variable").optimizer)


def set_later(kind: Any, *given: Any, **attributes: Any) -> Any:
    found = kind(*given)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: net("name").optimizer, "SGD._exclude_from_weight_decay_pattern"),
        (lambda: net("", 5), "SGD._iterations"),
        (lambda: set_later(keras.losses.Huber, slope=3.0), "Huber.slope"),
        (lambda: set_later(keras.metrics.AUC, limit=0.3), "AUC.limit"),
        (lambda: keras.losses.MeanSquaredError(), ""),
        (lambda: keras.metrics.AUC(), ""),
        (lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9)), ""),
    ],
)
def test_an_object_from_outside_whose_state_cannot_travel_is_refused(
    make: Any, sentence: str
) -> None:
    outside = make()

    def model() -> Any:
        return outside

    if not sentence:
        lk.Experiment(model=model, **BASE)
        return
    with pytest.raises(InvalidInput, match=f"function captures 'outside'.*{sentence}"):
        lk.Experiment(model=model, **BASE)
