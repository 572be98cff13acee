"""Test optimizers with sparse embedding gradients or accumulation against one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from labkit import Cluster

WORDS, WIDTH, STEPS = 2**14, 8, 6  # an embedding table of 1 MiB, so its gradients are sent as rows
PARTS = [(5, 3), (4, 4), (0, 6), (6, 1), (2, 2), (3, 5)]  # batch rows of the two ranks in each step

Optimizers = dict[str, tuple[str, dict[str, Any]]]

FEW: Optimizers = {
    "SGD": ("SGD", {"loss_scale_factor": 8.0}),
    "Adam": ("Adam", {"global_clipnorm": 0.05}),
    "accumulated": ("Adam", {"gradient_accumulation_steps": 3, "global_clipnorm": 0.5}),
}
OTHERS: Optimizers = {
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "RMSprop": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "Adagrad": ("Adagrad", {}),
    "Adadelta": ("Adadelta", {}),
    "Nadam": ("Nadam", {}),
    "Ftrl": ("Ftrl", {}),
    "Lion": ("Lion", {}),
    "Adafactor": ("Adafactor", {}),
    "clipnorm": ("Adam", {"clipnorm": 0.05}),
    "global_clipnorm": ("SGD", {"global_clipnorm": 0.05}),
}


def batch(step: int, rows: slice) -> tuple[Any, Any, int]:
    """Return words that repeat within and across ranks, the targets, and the number of rows."""
    random = np.random.default_rng(step)
    total = sum(PARTS[step % len(PARTS)])
    words = random.integers(0, WORDS, (total, 4))
    words[:, :2] = random.integers(7, 10, (total, 2))
    wanted = random.standard_normal((total, 3))
    return words[rows], wanted[rows], len(words[rows])


def train(optimizer: Any, parts: Any, watch: Any = lambda: None) -> list[np.ndarray]:
    """Return the weights after some steps in float64; `parts` selects the rows of each batch."""
    import keras
    import tensorflow as tf

    random = np.random.default_rng(1)
    arrays = [random.standard_normal(s) for s in ((WORDS, WIDTH), (WIDTH, 3))]
    table, kernel = variables = [
        keras.Variable(a, dtype="float64", name=n) for a, n in zip(arrays, "ab", strict=True)
    ]
    optimizer.build(variables)

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, 4), tf.int64),
            tf.TensorSpec((None, 3), tf.float64),
            tf.TensorSpec((), tf.int64),
        ]
    )
    def step(words: Any, wanted: Any, rows: Any) -> None:
        with tf.GradientTape() as tape:
            # The same table is looked up twice, so its gradient consists of two sparse tensors.
            first = tf.reduce_sum(keras.ops.take(table, words, axis=0), axis=1)
            second = keras.ops.take(table, words[:, 0], axis=0)
            error = (first * tf.tanh(second)) @ kernel.value - wanted
            loss = optimizer.scale_loss(
                tf.math.divide_no_nan(tf.reduce_sum(error**2), tf.cast(rows, tf.float64))
            )
        gradients = tape.gradient(loss, [table.value, kernel.value])
        assert isinstance(gradients[0], tf.IndexedSlices)
        if hasattr(optimizer, "rows"):
            optimizer.rows = rows
        else:  # one process: add up repeated rows of the table
            gradients[0] = tf.convert_to_tensor(gradients[0])
        optimizer.apply(gradients, variables)

    for number in range(STEPS):
        step(*batch(number, parts(number)))
        watch()
    return [variable.numpy() for variable in variables]


def both(communicator: Any, kinds: Optimizers, schedules: tuple[str, ...]) -> dict[str, Any]:
    """Return how far two ranks, and labkit on one, differ from one process, and bytes per step."""
    import keras

    from labkit import keras as lkk
    from labkit.communicator import single_rank

    def own(step: int) -> slice:
        first, _ = PARTS[step]
        return slice(0, first) if communicator.rank == 0 else slice(first, None)

    def whole(step: int) -> slice:
        return slice(None)

    found: dict[str, Any] = {}
    for name, (kind, options) in kinds.items():
        make = lambda: getattr(keras.optimizers, kind)(0.05, **options)  # noqa: B023, E731
        wanted = train(make(), whole)
        one = train(lkk.DistributedOptimizer(make(), single_rank()), whole)
        off, sent = [_off(one, wanted)], []
        for schedule in schedules:
            meter = [communicator.traffic.copy()]
            optimizer = lkk.DistributedOptimizer(
                make(), communicator, algorithm="ring", schedule=schedule
            )
            ended = train(optimizer, own, lambda: meter.append(communicator.traffic.copy()))  # noqa: B023
            off.append(_off(ended, wanted))
            steps = [b.since(a) for a, b in pairwise(meter)]
            sent.append([(s.messages, s.payload_bytes) for s in steps])
        found[name] = off, sent
    return found


def _off(ended: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    assert all(np.isfinite(array).all() for array in wanted)
    return max(float(np.max(np.abs(a - b))) for a, b in zip(ended, wanted, strict=True))


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the results of a few optimizers on two ranks."""
    return cluster.call(both, FEW, ("sequential", "overlap"), ranks=2)


@pytest.mark.parametrize("name", FEW)
def test_an_optimizer_with_an_embedding_ends_as_in_one_process(
    trained: list[dict[str, Any]], name: str
) -> None:
    for found in trained:
        off, sent = found[name]
        assert max(off) < 1e-12, off
        if name != "accumulated":
            table = 8 * WORDS * WIDTH
            assert all(payload < table / 100 for steps in sent for _, payload in steps)


@pytest.mark.slow
def test_every_optimizer_with_an_embedding_ends_as_in_one_process(cluster: Cluster) -> None:
    for found in cluster.call(both, OTHERS, ("sequential",), ranks=2):
        assert {name: off for name, (off, _) in found.items() if max(off) >= 1e-12} == {}


def test_gradients_that_are_added_up_travel_with_every_third_step_only(
    trained: list[dict[str, Any]],
) -> None:
    for found in trained:
        for steps in found["accumulated"][1]:
            silent, travelling = steps[0:2] + steps[3:5], [steps[2], steps[5]]
            assert silent == [(0, 0)] * 4
            assert all(messages > 0 and payload > 0 for messages, payload in travelling)
