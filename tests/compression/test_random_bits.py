"""Random numbers of a place and a key: even, and strangers to each other."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.compression.random_bits import uniform

MANY = 2**20


def drawn(first: int, second: int, length: int = MANY) -> np.ndarray:
    import tensorflow as tf

    draw = tf.function(uniform, jit_compile=True, autograph=False)
    return np.asarray(draw(length, tf.constant([first, second])))


def keys() -> list[tuple[int, int]]:
    """Of neighbouring seeds, ranks and steps, as `Compressor.start` and `next_key` make them."""
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
        # Chi squared of so many cells: its mean, and 4.5 of its deviations.
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
    # Also at places that are near each other: a stream must not be another one that is shifted.
    for shift in (0, 1, 2, 17):
        own = np.corrcoef(found[:, : MANY - shift], found[:, shift:])[: len(found), len(found) :]
        if shift == 0:
            np.fill_diagonal(own, 0)
        assert np.abs(own).max() < 5 / np.sqrt(MANY)
    for one in range(len(found)):
        for other in range(one):
            # Of numbers of 23 bits two of so many streams coincide by chance as often as this.
            assert (found[one] == found[other]).sum() < 10


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_place_has_its_number_whatever_the_length(length: int) -> None:
    np.testing.assert_array_equal(drawn(3, 4, length), drawn(3, 4, 5)[:length])
