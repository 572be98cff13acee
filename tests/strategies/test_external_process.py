"""Test processes of other frameworks: which losses they add, and whose optimizers they apply."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from labkit import Cluster, InvalidInput, TFDistribute
from labkit.bench.frameworks import experiments, measure
from labkit.strategies.external_framework import refuse_unweighted


def test_a_loss_that_is_no_mean_over_rows_is_refused() -> None:
    def compiled(reduction: str, mask: bool = False) -> keras.Model:
        layers = [keras.layers.Masking()] if mask else []
        model = keras.Sequential([keras.Input((3, 2)), *layers, keras.layers.Dense(1)])
        model.compile(loss=keras.losses.MeanSquaredError(reduction=reduction))
        return model

    refuse_unweighted(compiled("sum_over_batch_size"))
    with pytest.raises(InvalidInput, match=r"reduction='sum'.*use reduction='sum_over_batch_size'"):
        refuse_unweighted(compiled("sum"))
    with pytest.raises(InvalidInput, match="outputs carry a mask"):
        refuse_unweighted(compiled("sum_over_batch_size", mask=True))


def halved() -> keras.Model:
    """Return a model compiled with a user-defined optimizer that Keras does not know."""

    class Halved(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient, variable, learning_rate / 2)

    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=Halved(0.1), loss=loss)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        (TFDistribute("mirrored", cross_device_ops="reduction_to_one_device"), {}),
        (TFDistribute("mirrored", cross_device_ops="hierarchical_copy"), {"model": halved}),
        (TFDistribute(communication="auto"), {"optimizer": "lars"}),
    ],
)
def test_each_option_trains_and_so_does_each_optimizer(
    cluster: Cluster, strategy: TFDistribute, fields: dict[str, Any]
) -> None:
    (asked,) = experiments([strategy.kind], ["mlp"], ["sgd"])
    more = {"optimizer_options": {}, "model_options": {}} if fields else {}
    ((row, _),) = measure(cluster, [asked.replace(strategy=strategy, **more, **fields)])
    assert row["max_abs_difference"] <= 1e-12
