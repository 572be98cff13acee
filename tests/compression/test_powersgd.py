"""Test PowerSGD: its volume for ResNet-18, and its approximation of matrices by few columns."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from labkit.compression import Mean, reduce_all
from labkit.compression.powersgd import PowerSGD


def resnet18() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-18's variables for CIFAR-10; kernels have Keras's layout."""
    shapes: list[tuple[int, ...]] = [(3, 3, 3, 64), (64,), (64,)]
    wide = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(3, 3, wide, width), (width,), (width,)]
            shapes += [(3, 3, width, width), (width,), (width,)]
            if block == 0 and wide != width:
                shapes += [(1, 1, wide, width), (width,), (width,)]
            wide = width
    return [*shapes, (512, 10), (10,)]


@pytest.mark.parametrize(("approximation_rank", "ratio"), [(1, 243), (2, 136), (4, 72)])
def test_volume_of_resnet18_is_the_published_one(approximation_rank: int, ratio: int) -> None:
    compressor = PowerSGD(approximation_rank=approximation_rank)
    shapes = resnet18()
    everything = sum(map(prod, shapes))
    assert everything == 11_173_962
    assert round(everything / sum(map(compressor.elements, shapes))) == ratio


@pytest.mark.parametrize("shape", [(40, 30), (3, 3, 4, 20), (7,), (2, 3), (0, 5), ()])
def test_a_rank_asks_for_as_many_elements_as_it_tells(shape: tuple[int, ...]) -> None:
    import tensorflow as tf

    compressor = PowerSGD()
    reduction = compressor.reduce(tf.ones(shape), compressor.start(shape))
    requests, answer = [], None
    while True:
        try:
            requests.append(reduction.send(answer))
        except StopIteration as end:
            reduced = end.value
            break
        answer = requests[-1].value
    assert reduced.mean.shape == shape
    assert all(isinstance(request, Mean) for request in requests)
    assert sum(int(tf.size(request.value)) for request in requests) == compressor.elements(shape)


@pytest.mark.parametrize("shape", [(5,), (2, 2)])
def test_what_is_smaller_than_its_factors_is_sent_as_it_is(shape: tuple[int, ...]) -> None:
    import tensorflow as tf

    tensors = [tf.random.stateless_normal(shape, [0, rank]) for rank in range(2)]
    reduced = reduce_all(PowerSGD(), tensors, [PowerSGD().start(shape)] * 2)
    np.testing.assert_allclose(reduced[0].mean, np.mean(tensors, 0), rtol=1e-6)
    np.testing.assert_array_equal(reduced[1].sent, tensors[1])


def matrices(rank: int) -> list[np.ndarray]:
    """Return matrices of three ranks, of shape (6, 5, 20), whose mean has this matrix rank."""
    draw = np.random.default_rng(1).standard_normal
    columns = draw((30, rank))
    return [(columns @ draw((rank, 20))).reshape(6, 5, 20) for _ in range(3)]


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_matrix_of_the_rank_is_said_exactly(warm_start: bool) -> None:
    compressor = PowerSGD(approximation_rank=2, warm_start=warm_start)
    tensors = matrices(rank=2)
    states = [compressor.start((6, 5, 20), rank) for rank in range(3)]
    reduced = reduce_all(compressor, tensors, states)
    for each in reduced:
        np.testing.assert_allclose(each.mean, np.mean(tensors, 0), atol=1e-10)
        np.testing.assert_array_equal(each.mean, reduced[0].mean)
    np.testing.assert_allclose(reduced[1].sent, tensors[1], atol=1e-10)


def errors(compressor: PowerSGD, steps: int) -> list[float]:
    tensors = matrices(rank=15)
    states = [compressor.start((6, 5, 20), rank) for rank in range(3)]
    found = []
    for _ in range(steps):
        reduced = reduce_all(compressor, tensors, states)
        states = [each.state for each in reduced]
        sent = np.mean([each.sent for each in reduced], 0)
        np.testing.assert_allclose(reduced[0].mean, sent, atol=1e-10)
        found.append(float(np.linalg.norm(reduced[0].mean - np.mean(tensors, 0))))
    return found


def test_warm_start_comes_to_the_best_approximation_of_a_matrix_that_stays() -> None:
    values = np.linalg.svd(np.mean(matrices(rank=15), 0).reshape(30, 20), compute_uv=False)
    best = np.linalg.norm(values[2:])
    found = errors(PowerSGD(), 100)
    assert found[0] > 1.02 * best
    assert found[-1] == pytest.approx(best, rel=1e-3)
    assert min(errors(PowerSGD(warm_start=False), 5)) > 1.005 * best


def test_zero_stays_zero_and_does_not_stop_the_iteration() -> None:
    import tensorflow as tf

    compressor = PowerSGD()
    state = compressor.start((30, 20))
    zero = reduce_all(compressor, [tf.zeros((30, 20))], [state])[0]
    assert not zero.mean.numpy().any()
    tensor = tf.random.stateless_normal((30, 20), [1, 2])
    state = zero.state
    for _ in range(3):
        reduced = reduce_all(compressor, [tensor], [state])[0]
        state = reduced.state
    assert np.linalg.norm(reduced.mean) > 0.4 * np.linalg.norm(tensor)


def test_precision_is_that_of_the_tensor() -> None:
    reduced = reduce_all(PowerSGD(), matrices(2)[:1], [PowerSGD().start((6, 5, 20))])[0]
    assert reduced.mean.dtype == reduced.sent.dtype == "float64"
