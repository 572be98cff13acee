"""Test that names of losses, metrics and optimizer arguments are checked before a start."""

from __future__ import annotations

import inspect

import keras
import pytest
from keras.src import losses, metrics

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.experiment.keras_names import COMMON_ARGUMENTS, LOSSES, METRICS, OPTIMIZER_ARGUMENTS
from labkit.keras.lars import LARS
from labkit.strategies.validation import OPTIMIZERS


def _resolved(family: object) -> set[str]:
    """Return the names in a Keras family that give an object without further arguments."""
    found = set()
    for name in family.ALL_OBJECTS_DICT:  # type: ignore[attr-defined]
        try:
            family.get(name)  # type: ignore[attr-defined]
        except TypeError:
            continue
        found.add(name)
    return found - {"Loss", "LossFunctionWrapper", "Metric", "metric"}


def test_the_names_are_those_that_keras_resolves() -> None:
    assert set(LOSSES) == _resolved(losses)
    assert set(METRICS) == _resolved(metrics) | {"acc", "accuracy"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_arguments_are_those_of_the_optimizer(name: str) -> None:
    kinds = {each.lower(): kind for each, kind in vars(keras.optimizers).items()} | {"lars": LARS}
    arguments = set(inspect.signature(kinds[name]).parameters) - {"kwargs", "options"}
    # LARS accepts the common arguments by its parameter **options.
    assert arguments | set(COMMON_ARGUMENTS) == {*OPTIMIZER_ARGUMENTS[name], *COMMON_ARGUMENTS}


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"loss": "cross"}, "'binary_crossentropy', 'binary_focal_crossentropy' or"),
        ({"loss": "mean_square_error"}, "'mean_squared_error'"),
        ({"loss": "Sparse_Categorical_Crossentropy"}, "'sparse_categorical_crossentropy'"),
        ({"metrics": ("accuracy", "acuracy")}, "'accuracy'"),
        ({"metrics": ("binary_acc",)}, "'binary_accuracy'"),
        ({"optimizer_options": {"momentun": 0.9}}, "'momentum'"),
        ({"optimizer": "adam", "optimizer_options": {"beta1": 0.9}}, "'beta_1'"),
        ({"optimizer": "adam", "optimizer_options": {"lr": 0.9}}, "'learning_rate'"),
    ],
)
def test_a_name_that_keras_does_not_know_is_refused_with_the_nearest(
    fields: dict[str, object], near: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        lk.Experiment(**fields)
    assert f"(did you mean {near}" in str(caught.value)


def test_names_that_keras_knows_are_taken() -> None:
    lk.Experiment(loss="MeanSquaredError", metrics=("acc", "mae", "AUC"))
    lk.Experiment(optimizer="lars", optimizer_options={"momentum": 0.8, "clipnorm": 1.0})
