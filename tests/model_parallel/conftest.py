"""What tests of parts of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def in_float64() -> Iterator[None]:
    """Keras computes in float64, from a seed, while the tests of a module run."""
    import keras

    keras.utils.set_random_seed(1)
    for name in ("float64", "float32"):
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)
        if name == "float64":
            yield
