"""Processes of other frameworks: which losses add up there, and whose optimizers they apply."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from labkit import Cluster, InvalidInput
from labkit.bench.frameworks import experiments, measure
from labkit.strategies.elsewhere import refuse_unweighted


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


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_optimizers_that_keras_does_not_know_train(cluster: Cluster, own: bool) -> None:
    def compiled() -> Any:
        class Halved(keras.optimizers.SGD):
            """Of a user's own."""

            def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
                super().update_step(gradient, variable, learning_rate / 2)

        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=Halved(0.1), loss=loss)
        return model

    (asked,) = experiments(["multi_worker_mirrored"], ["mlp"], ["sgd"])
    what: dict[str, Any] = {"optimizer": "lars", "optimizer_options": {}}
    if own:
        what = {"model": compiled, "model_options": {}, "optimizer_options": {}}
    ((row, _),) = measure(cluster, [asked.replace(**what)])
    assert row["max_abs_difference"] <= 1e-12
