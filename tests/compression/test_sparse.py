"""Test top-k, threshold and random-k: what they keep, its bytes, and its expectation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.compression import Compressor, nbytes, reduce_all
from labkit.compression.sparsification import RandomK, Threshold, TopK, scatter, select_above

LONG = 100_003  # long enough for sampling, and not a multiple of a row

ALL = [
    TopK(ratio=0.1, threshold="exact"),
    TopK(ratio=0.1),
    Threshold(value=0.5),
    RandomK(ratio=0.1),
    RandomK(ratio=0.1, rescale=True),
]


def gaussian(n: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(dtype)


def encode(compressor: Compressor, array: np.ndarray, seed: int = 0) -> dict[str, Any]:
    import tensorflow as tf

    tensor = tf.constant(array)
    return dict(compressor.encode(tensor, compressor.start(array.shape, seed=seed)))


def roundtrip(compressor: Compressor, array: np.ndarray, seed: int = 0) -> np.ndarray:
    return compressor.decode(encode(compressor, array, seed)).numpy()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [0, 1, 7, 1001])
@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_what_is_decoded_is_the_tensor_where_sent_and_zero_elsewhere(
    compressor: Compressor, n: int, dtype: str
) -> None:
    array = gaussian(n, dtype=dtype)
    decoded = roundtrip(compressor, array)
    assert decoded.shape == (n,)
    assert decoded.dtype == dtype
    sent = decoded != 0
    if isinstance(compressor, RandomK) and compressor.rescale:
        assert {*np.round(decoded[sent] / array[sent])} <= {1, 7, 10, 11}
    else:
        np.testing.assert_array_equal(decoded[sent], array[sent])


@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_zero_stays_zero(compressor: Compressor) -> None:
    assert not roundtrip(compressor, np.zeros(33, "float32")).any()


# TensorFlow rounds subnormal numbers to zero.
NORMAL = st.floats(-10, 10, width=32, allow_subnormal=False)


@given(st.lists(NORMAL, min_size=1, max_size=40), st.floats(0.01, 1))
@settings(max_examples=30)
def test_exact_top_k_keeps_k_and_none_greater_is_left(values: list[float], ratio: float) -> None:
    array = np.array(values, "float32")
    indices = encode(TopK(ratio=ratio, threshold="exact"), array)["indices"].numpy()
    assert len(indices) == max(1, round(ratio * len(array)))
    assert (np.diff(indices) > 0).all()
    left = np.delete(np.abs(array), indices)
    assert left.max(initial=0) <= np.abs(array[indices]).min()


@pytest.mark.parametrize("ratio", [0.005, 0.01, 0.1, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("n", [300, 1000, 5000, LONG])
@pytest.mark.parametrize("zeros", [0.0, 0.999])
def test_exact_top_k_of_long_ones_is_that_of_a_sort(n: int, ratio: float, zeros: float) -> None:
    array = gaussian(n)
    array[: int(zeros * n)] = 0
    indices = encode(TopK(ratio=ratio, threshold="exact"), array)["indices"].numpy()
    k = max(1, round(ratio * n))
    assert len(indices) == k
    assert (np.diff(indices) > 0).all()
    np.testing.assert_array_equal(np.sort(np.abs(array[indices])), np.sort(np.abs(array))[n - k :])


@pytest.mark.parametrize("shape", ["gaussian", "heavy tail", "mostly zero", "constant", "ordered"])
def test_sampled_top_k_keeps_the_greatest_and_at_most_two_k(shape: str) -> None:
    array = gaussian(LONG)
    if shape == "heavy tail":
        array = array**5
    elif shape == "mostly zero":
        array[200:] = 0
    elif shape == "constant":
        array[:] = -3
    elif shape == "ordered":
        array.sort()
    k = round(0.01 * LONG)
    indices = encode(TopK(ratio=0.01), array)["indices"].numpy()
    assert (np.diff(indices) > 0).all()
    assert (200 if shape == "mostly zero" else k / 2) <= len(indices) <= 2 * k
    assert np.delete(np.abs(array), indices).max() <= np.abs(array[indices]).min()


def test_a_ratio_without_an_element_keeps_one() -> None:
    array = gaussian(50)
    assert roundtrip(TopK(ratio=1e-6), array).nonzero()[0] == [np.abs(array).argmax()]
    assert np.count_nonzero(roundtrip(RandomK(ratio=1e-6), array)) == 1


@given(st.integers(0, 70), st.integers(0, 2**16), st.floats(0.1, 3))
@settings(max_examples=30)
def test_above_finds_what_a_plain_search_finds(n: int, seed: int, threshold: float) -> None:
    array = gaussian(n, seed)
    expected = np.flatnonzero(np.abs(array) >= np.float32(threshold))
    indices, values = select_above(array, threshold)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, array[expected])


def test_scatter_of_nothing_is_zero() -> None:
    assert scatter(np.array([], "int32"), np.array([], "float32"), 3).numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [  # each part has a count of 4 bytes; length: 4 bytes; k = 100 of 1000
        (TopK(ratio=0.1, threshold="exact"), 3 * 4 + 4 + 100 * (4 + 4)),
        (RandomK(ratio=0.1), 3 * 4 + 4 + 100 * 4 + 8),
    ],
    ids=repr,
)
def test_bytes_follow_the_formula(compressor: Compressor, expected: int) -> None:
    assert nbytes(encode(compressor, gaussian(1000))) == expected


def test_threshold_takes_eight_bytes_an_element_above_it() -> None:
    array = gaussian(1000)
    above_it = np.count_nonzero(np.abs(array) >= 1)
    assert nbytes(encode(Threshold(value=1), array)) == 16 + 8 * above_it


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 23])
def test_random_k_with_rescale_is_unbiased_and_has_the_published_variance(n: int) -> None:
    array = gaussian(n, dtype="float64")
    compressor, draws = RandomK(ratio=0.25, rescale=True), 1000
    assert compressor.unbiased
    key = compressor.start([n])
    decoded = np.stack(
        [
            compressor.decode(compressor.encode(array, key + np.array([0, step])))
            for step in range(draws)
        ]
    )
    deviation = decoded.std(0) / np.sqrt(draws)
    assert (np.abs(decoded.mean(0) - array) <= 4.5 * deviation + 1e-12).all()
    k = round(0.25 * n)
    variance = ((decoded - array) ** 2).sum(1).mean() / (array**2).sum()
    assert variance == pytest.approx(n / k - 1, rel=0.2)


def test_random_k_without_rescale_keeps_elements_as_they_are() -> None:
    assert not RandomK().unbiased


def test_random_k_draws_the_same_on_all_ranks_and_others_in_the_next_step() -> None:
    compressor = RandomK(ratio=0.05)
    keys = [compressor.start([LONG], rank) for rank in range(3)]
    array = gaussian(LONG)
    first, second = (compressor.decode(compressor.encode(array, key)) for key in keys[:2])
    np.testing.assert_array_equal(first, second)
    later = compressor.decode(compressor.encode(array, keys[0] + [0, 1]))
    assert (later.numpy() != first.numpy()).any()


@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_all_ranks_get_the_mean_of_what_was_sent(compressor: Compressor) -> None:
    import tensorflow as tf

    tensors = [tf.constant(gaussian(999, rank)) for rank in range(3)]
    states = [compressor.start([999], rank) for rank in range(3)]
    for _ in range(2):
        reduced = reduce_all(compressor, tensors, states)
        states = [each.state for each in reduced]
        sent = np.mean([each.sent for each in reduced], 0)
        for each in reduced:
            np.testing.assert_array_equal(each.mean, reduced[0].mean)
            np.testing.assert_allclose(each.mean, sent, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(TopK, {"ratio": 0}), (TopK, {"threshold": "guessed"}), (Threshold, {"value": -1})],
)
def test_impossible_fields_are_refused(kind: type[Compressor], fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(fields))):
        kind(**fields)
