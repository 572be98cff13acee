"""Test deep gradient compression: conservation, warm-up, momentum and clipping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.compression import Reduced, reduce_all
from labkit.compression.dgc import DGC


def step(compressor: DGC, gradients: np.ndarray, states: list[Any]) -> list[Reduced]:
    import tensorflow as tf

    return reduce_all(compressor, [tf.constant(g) for g in gradients], states)


@given(
    n=st.sampled_from([0, 1, 7, 33, 20_003]),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 99),
    momentum=st.sampled_from([0.0, 0.9]),
)
@settings(max_examples=15)
def test_accumulation_and_what_is_sent_are_the_old_accumulation_and_the_velocity(
    n: int, dtype: str, seed: int, momentum: float
) -> None:
    compressor = DGC(ratio=0.1, momentum=momentum)
    states = [compressor.start([n], rank) for rank in range(2)]
    draw = np.random.default_rng(seed).standard_normal
    for _ in range(3):
        gradients = draw((2, n)).astype(dtype)
        reduced = step(compressor, gradients, states)
        for gradient, old, each in zip(gradients, states, reduced, strict=True):
            velocity = momentum * old[1].numpy().astype(dtype) + gradient
            before, after = compressor.residual(old), compressor.residual(each.state)
            expected = before.numpy().astype(dtype) + velocity
            eps = np.finfo(dtype).eps
            np.testing.assert_allclose(after + each.sent, expected, rtol=8 * eps, atol=8 * eps)
            sent = each.sent.numpy() != 0
            assert not after.numpy()[sent].any()
            np.testing.assert_allclose(
                each.state[1], np.where(sent, 0, velocity), rtol=8 * eps, atol=8 * eps
            )
        sent = np.mean([each.sent for each in reduced], 0)
        np.testing.assert_allclose(reduced[0].mean, sent, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(reduced[0].mean, reduced[1].mean)
        states = [each.state for each in reduced]


def test_warm_up_goes_through_the_published_sparsities() -> None:
    compressor = DGC(warmup_steps=8)
    sparsities = [100 * (1 - compressor.density(at)) for at in range(10)]
    expected = [75, 75, 93.75, 93.75, 98.4375, 98.4375, 99.609375, 99.609375, 99.9, 99.9]
    np.testing.assert_allclose(sparsities, expected)
    assert DGC().density(0) == 0.001
    assert DGC(ratio=0.1, warmup_steps=4).density(3) == 0.1


def test_steps_send_what_the_warm_up_says() -> None:
    compressor = DGC(ratio=0.001, warmup_steps=4)
    state, found = compressor.start([1000]), []
    for at in range(6):
        gradient = np.random.default_rng(at).standard_normal((1, 1000))
        reduced = step(compressor, gradient, [state])[0]
        state = reduced.state
        found.append(np.count_nonzero(reduced.sent))
    assert found == [250, 62, 16, 4, 1, 1]


def test_with_all_elements_it_is_the_plain_mean() -> None:
    """Factor masking clears the velocity of all elements that are sent."""
    compressor = DGC(ratio=1)
    states = [compressor.start([5], rank) for rank in range(2)]
    for at in range(3):
        gradients = np.random.default_rng(at).standard_normal((2, 5))
        reduced = step(compressor, gradients, states)
        states = [each.state for each in reduced]
        np.testing.assert_allclose(reduced[0].mean, gradients.mean(0))


def test_an_element_that_waits_gathers_momentum() -> None:
    compressor = DGC(ratio=0.5, momentum=0.5)
    state = compressor.start([2])
    for expected in (1.0, 2.5, 4.25):  # accumulation of the unsent element: 1, 1 + 1.5, 2.5 + 1.75
        reduced = step(compressor, np.array([[100.0, 1.0]]), [state])[0]
        state = reduced.state
        assert compressor.residual(state).numpy().tolist() == [0, expected]


@pytest.mark.parametrize("ranks", [1, 4])
def test_clipped_gradients_of_independent_ranks_have_a_mean_of_the_norm(ranks: int) -> None:
    compressor = DGC(ratio=1, clip_norm=2)
    long, short = 50 * np.eye(ranks), 0.5 * np.eye(ranks)  # orthogonal gradients, one per rank
    for gradients, norm in ((long, 2), (short, 0.5 / ranks**0.5)):
        states = [compressor.start([ranks], rank, ranks=ranks) for rank in range(ranks)]
        mean = step(compressor, gradients, states)[0].mean
        np.testing.assert_allclose(np.linalg.norm(mean), norm, rtol=1e-6)


def test_zero_stays_zero() -> None:
    compressor = DGC()
    reduced = step(compressor, np.zeros((1, 9)), [compressor.start([9])])[0]
    assert not reduced.sent.numpy().any()
    assert not compressor.residual(reduced.state).numpy().any()


@pytest.mark.parametrize(
    ("optimizer", "options", "told"),
    [
        ("adam", {}, "optimizer='adam' would apply twice"),
        ("sgd", {"momentum": 0.9}, "optimizer='sgd' with momentum=0.9 would apply twice"),
    ],
)
def test_a_momentum_of_the_optimizer_is_refused(
    optimizer: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidInput, match=told):
        DGC().check(optimizer, options)
    DGC().check("sgd", {"momentum": 0.0})
