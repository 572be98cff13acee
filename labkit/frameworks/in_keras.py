"""Exported models and losses for other Keras versions: with an older TensorFlow, or on JAX.

This module does not import Keras; callers pass their Keras module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.frameworks.exported import Exported


def model_of(exported: Exported, weights: list[np.ndarray], keras: Any) -> Any:
    """Return the exported model with the given weights, built with the caller's Keras module."""
    layers = [getattr(keras.layers, kind)(**options) for kind, options in exported.layers]
    model = keras.Sequential([keras.Input(exported.shape), *layers])
    model.set_weights(weights)
    return model


def loss_of(exported: Exported, keras: Any, **more: str) -> Any:
    """Return the exported loss function, built with the caller's Keras module; it takes logits."""
    options = {"SparseCategoricalCrossentropy": {"from_logits": True}}.get(exported.loss, {})
    return getattr(keras.losses, exported.loss)(**options, **more)
