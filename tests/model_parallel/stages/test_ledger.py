"""Test the bytes that stages keep, against the prediction from shapes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from labkit.communicator import WALL
from labkit.model_parallel.stages import (
    MemoryLedger,
    Stage,
    block_seconds,
    footprint,
    kept_bytes,
    split_model,
)
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import interleaved

Layers = keras.layers
ROWS, FLOAT = 8, 4
# Bytes per row: 16 inputs, and layer outputs of 20, 24 and 28 numbers.
DENSE = FLOAT * (16 + 20 + 24 + 28)
KEPT = FLOAT * (16 + 20 + 24)  # no gradient of a linear layer needs its output


def dense() -> Any:
    layers = [Layers.Dense(20, "relu"), Layers.Dense(24, "tanh"), Layers.Dense(28)]
    return keras.Sequential([keras.Input((16,)), *layers])


def with_statistics() -> Any:
    layers = [Layers.Dense(6), Layers.BatchNormalization(), Layers.Dropout(0.5), Layers.Dense(3)]
    return keras.Sequential([keras.Input((4, 2)), Layers.Flatten(), *layers])


def opened(stages: list[Stage], steps: int = 1) -> MemoryLedger:
    ledger = MemoryLedger(steps)
    for stage in stages:
        stage.ledger = ledger
    return ledger


def step(stage: Stage, count: int) -> None:
    """Run all micro-batches forward, then all backward."""
    x = tf.random.normal((ROWS, *stage.model.input_shape[1:]))
    for number in range(count):
        y = stage.forward(number, x + number, 1.0)
    for number in reversed(range(count)):
        stage.backward(number, tf.ones_like(y))


def test_activations_are_what_each_micro_batch_goes_back_by_and_weights_are_none() -> None:
    stage = Stage(dense(), first=True)
    ledger = opened([stage])
    for _ in range(3):
        ledger.step()
        step(stage, 3)
        stage.take_gradients()
    assert ledger.most["activations"] == 3 * ROWS * KEPT
    assert ledger.most["gradients"] == FLOAT * stage.model.count_params()
    assert ledger.most["versions"] == 0
    assert footprint.activations(stage.model) == DENSE
    assert not ledger.open


def test_recomputed_are_inputs_and_one_micro_batch() -> None:
    stage = Stage(dense(), first=True, recompute=True)
    ledger = opened([stage])
    for _ in range(2):
        ledger.step()
        step(stage, 3)
    kept = ROWS * (2 * FLOAT * 16 + KEPT)
    assert ledger.most["activations"] == kept
    table = PIPELINE["gpipe"](1, 3)
    predicted = footprint.of_stages([stage.model], table, 0, ROWS, True)["activations"]
    assert predicted == kept + ROWS * (DENSE - KEPT)


def test_between_both_parts_of_backward_the_weight_part_is_kept() -> None:
    """Test that each layer's input and output gradient are kept, but no gradient of the input."""
    stage = Stage(dense())
    ledger = opened([stage])
    for _ in range(2):
        ledger.step()
        y = stage.forward(0, tf.random.normal((ROWS, 16)), 1.0)
        ledger.most["activations"] = 0
        stage.backward(0, tf.ones_like(y), weights_later=True)
        stage.backward_weight(0)
    assert ledger.most["activations"] == ROWS * (KEPT + FLOAT * (20 + 24 + 28))


def test_changed_weights_that_a_pass_still_needs_are_versions() -> None:
    stage = Stage(dense())
    ledger = opened([stage])
    optimizer = keras.optimizers.SGD(0.1)
    for _ in range(2):
        ledger.step()
        x = tf.random.normal((ROWS, 16))
        for number in range(3):  # one update between two forward passes
            y = stage.forward(number, x + number, 1.0)
            ones = [tf.ones_like(variable.value) for variable in stage.variables]
            optimizer.apply(ones, stage.variables)
        for number in range(3):
            stage.backward(number, tf.ones_like(y))
    kernels = FLOAT * (16 * 20 + 20 * 24 + 24 * 28)  # no backward pass needs a bias
    assert ledger.most["versions"] == 2 * kernels
    assert ledger.most["activations"] == 3 * ROWS * KEPT


def test_weights_of_another_stage_of_the_rank_are_no_old_ones() -> None:
    stages = [Stage(part, first=n == 0) for n, part in enumerate(split_model(dense(), [0, 2, 3]))]
    ledger = opened(stages)
    for _ in range(2):
        ledger.step()
        for number in range(2):
            y = tf.random.normal((ROWS, 16))
            for stage in stages:
                y = stage.forward(number, y, 1.0)
        for number in range(2):
            y = tf.ones((ROWS, 28))
            for stage in reversed(stages):
                y = stage.backward(number, y)
    assert ledger.most["versions"] == 0
    assert ledger.most["activations"] == 2 * ROWS * KEPT  # a tensor between stages counts once


def test_a_closed_ledger_counts_nothing() -> None:
    stage = Stage(dense())
    step(stage, 2)
    assert not any(stage.ledger.most.values())


def test_a_pass_beside_training_counts_the_same_and_leaves_no_trace() -> None:
    assert kept_bytes(dense(), ROWS) == ROWS * DENSE
    model = with_statistics()
    before = [variable.numpy() for variable in model.variables]
    drawn = np.random.get_state()[1].tolist()
    assert kept_bytes(model, ROWS) > ROWS * footprint.activations(model)  # masks, statistics
    seconds = block_seconds(model, ROWS, WALL)
    assert len(seconds) == 5
    assert min(seconds) > 0
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert np.random.get_state()[1].tolist() == drawn


def test_what_only_reshapes_keeps_nothing_and_models_in_models_count_their_layers() -> None:
    assert footprint.activations(with_statistics()) == FLOAT * (8 + 6 + 6 + 6 + 3)
    nested = keras.Sequential([keras.Input((16,)), dense(), Layers.Dense(5)])
    assert footprint.activations(nested) == DENSE + FLOAT * 5


@pytest.mark.parametrize(
    ("name", "held"),
    [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1]), ("zero_bubble", [3, 3, 3]), ("layerwise", [1] * 3)],
)
def test_schedules_keep_their_micro_batches(name: str, held: list[int]) -> None:
    models = split_model(dense(), [0, 1, 2, 3])
    a_row = [FLOAT * (16 + 20), FLOAT * (20 + 24), FLOAT * (24 + 28)]
    table = PIPELINE[name](3, 6)
    for rank in range(3):
        found = footprint.of_stages(models, table, rank, ROWS)
        assert found == {"activations": held[rank] * ROWS * a_row[rank], "versions": 0}


def test_versions_of_weights_are_predicted_where_a_schedule_keeps_them() -> None:
    models = split_model(dense(), [0, 1, 2, 3])
    weights = [footprint.weights([model])["weights"] for model in models]
    table = PIPELINE["pipedream"](3, 6)
    older = [footprint.of_stages(models, table, rank, ROWS)["versions"] for rank in range(3)]
    assert older == [2 * weights[0], weights[1], 0]
    late = [footprint.of_module(models[rank], 3, rank, ROWS) for rank in range(3)]
    assert [each["versions"] for each in late] == older
    assert late[0]["activations"] == 3 * ROWS * FLOAT * (16 + 20)


def test_chunks_of_a_rank_count_by_their_own_sizes() -> None:
    models = split_model(dense(), [0, 1, 3])
    found = footprint.of_stages(models, interleaved(1, 2, 2), 0, ROWS)
    # Each chunk holds a micro-batch, and both sides of the cut keep its 20 numbers.
    assert found["activations"] == ROWS * (DENSE + FLOAT * 20)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (keras.optimizers.SGD(), 0),
        (keras.optimizers.SGD(momentum=0.9), 1),
        (keras.optimizers.Adam(), 2),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_the_state_of_an_optimizer_is_what_it_becomes(optimizer: Any, copies: int) -> None:
    model = dense()
    gradients = footprint.weights([model])["gradients"]
    used = type(optimizer).from_config(optimizer.get_config())
    used.build(model.trainable_variables)
    real = sum(int(variable.value.numpy().nbytes) for variable in used.variables)
    found = footprint.optimizer(optimizer, gradients)
    assert found == real
    assert found // gradients == copies
