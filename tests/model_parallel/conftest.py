"""Fixtures of the model-parallel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def in_float64() -> Iterator[None]:
    """Make Keras compute in float64, from a seed, during a module's tests."""
    import keras

    keras.utils.set_random_seed(1)
    for name in ("float64", "float32"):
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)
        if name == "float64":
            yield
