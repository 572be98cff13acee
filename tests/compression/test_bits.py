"""Test the packing of codes of a few bits: unpacking restores them, and the size is minimal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labkit.compression.numbers import pack, split_ranges, unpack


def there_and_back(codes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    import tensorflow as tf

    packed = pack(tf.constant(codes, tf.uint8), bits)
    length = tf.constant(len(codes))
    return packed.numpy(), unpack(
        packed, bits, length, lambda code: tf.cast(code, tf.int32)
    ).numpy()


@settings(max_examples=20)
@example(bits=3, n=0, seed=0)
@given(bits=st.integers(1, 8), n=st.integers(0, 70), seed=st.integers(0, 9))
def test_codes_come_back_whatever_their_width_and_number(bits: int, n: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, n)
    packed, back = there_and_back(codes, bits)
    np.testing.assert_array_equal(back, codes)
    assert packed.dtype == np.uint8
    assert n * bits / 8 <= packed.size < n * bits / 8 + 3


def test_twenty_signs_lie_as_they_are_drawn() -> None:
    for index in range(20):
        packed, _ = there_and_back(np.arange(20) == index, 1)
        expected = np.zeros(3, np.uint8)
        expected[index % 3] = 1 << index // 3
        np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("n", [0, 1, 7, 16, 17])
def test_stretches_behind_each_other_are_the_tensor_and_zeros(n: int) -> None:
    import tensorflow as tf

    cut = [stretch.numpy() for stretch in split_ranges(tf.range(1, n + 1), 8)]
    assert len(cut) == 8
    assert len({len(each) for each in cut}) == 1
    whole = np.concatenate(cut)
    np.testing.assert_array_equal(whole[:n], np.arange(1, n + 1))
    assert len(whole) < n + 8
    assert not whole[n:].any()
