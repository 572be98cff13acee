"""Test random numbers by position and key: uniform, and independent for different keys."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.compression.numbers import uniform

MANY = 2**20


def drawn(first: int, second: int, length: int = MANY) -> np.ndarray:
    import tensorflow as tf

    draw = tf.function(uniform, jit_compile=True, autograph=False)
    return np.asarray(draw(length, tf.constant([first, second])))


def keys() -> list[tuple[int, int]]:
    """Return keys of close seeds, ranks and steps, as by `Compressor.start` and `next_key`."""
    return [(1, 0), (1, 1), (2, 0), (2, 1), (65_538, 0), (65_538, 1), (1, 4_096)]


@pytest.mark.parametrize("key", keys())
def test_each_number_is_as_likely_as_each_other(key: tuple[int, int]) -> None:
    numbers = drawn(*key)
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for cells in (16, 4_096):
        counts = np.bincount((numbers * cells).astype(int), minlength=cells)
        expected = MANY / cells
        # The chi-squared value of these cells is near its mean, within 4.5 standard deviations.
        chi = float(((counts - expected) ** 2).sum() / expected)
        assert abs(chi - (cells - 1)) < 4.5 * np.sqrt(2 * (cells - 1))


@pytest.mark.parametrize("bit", [1, 2, 8, 16, 22])
def test_upper_and_lower_bits_are_fair_and_do_not_follow_each_other(bit: int) -> None:
    bits = (drawn(1, 0) * 2**bit).astype(int) & 1
    for lag in (1, 2, 3, 16, 512, 1_024):
        same = float((bits[lag:] == bits[:-lag]).mean())
        assert abs(same - 0.5) < 4.5 * 0.5 / np.sqrt(MANY)


def test_numbers_of_other_keys_are_strangers() -> None:
    found = np.stack([drawn(*key) for key in keys()])
    # Nearby positions are compared, too, because no stream may be a shifted copy of another.
    for shift in (0, 1, 2, 17):
        own = np.corrcoef(found[:, : MANY - shift], found[:, shift:])[: len(found), len(found) :]
        if shift == 0:
            np.fill_diagonal(own, 0)
        assert np.abs(own).max() < 5 / np.sqrt(MANY)
    for one in range(len(found)):
        for other in range(one):
            # By chance, two of these streams of 23-bit numbers agree in fewer positions than this.
            assert (found[one] == found[other]).sum() < 10


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_place_has_its_number_whatever_the_length(length: int) -> None:
    np.testing.assert_array_equal(drawn(3, 4, length), drawn(3, 4, 5)[:length])
