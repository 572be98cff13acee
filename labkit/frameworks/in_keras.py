"""Exported models and losses for another Keras: that of an older TensorFlow, or Keras on JAX.

This module imports no Keras; callers pass their Keras module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.frameworks.exported import Exported


def model_of(exported: Exported, weights: list[np.ndarray], keras: Any) -> Any:
    """Return the exported model, built with the caller's Keras module, with these weights."""
    layers = [getattr(keras.layers, kind)(**options) for kind, options in exported.layers]
    model = keras.Sequential([keras.Input(exported.shape), *layers])
    model.set_weights(weights)
    return model


def loss_of(exported: Exported, keras: Any, **more: str) -> Any:
    """Return the exported loss of the caller's Keras module; the model's outputs are logits."""
    options = {"SparseCategoricalCrossentropy": {"from_logits": True}}.get(exported.loss, {})
    return getattr(keras.losses, exported.loss)(**options, **more)
