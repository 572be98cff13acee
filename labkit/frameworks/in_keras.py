"""What labkit has exported, made anew by another Keras: of an older TensorFlow, or on JAX.

No Keras is imported here: it is handed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.frameworks.exported import Exported


def model_of(told: Exported, weights: list[np.ndarray], keras: Any) -> Any:
    """The model with these weights."""
    layers = [getattr(keras.layers, kind)(**options) for kind, options in told.layers]
    model = keras.Sequential([keras.Input(told.shape), *layers])
    model.set_weights(weights)
    return model


def loss_of(told: Exported, keras: Any, **more: str) -> Any:
    """The loss; scores are logits."""
    options = {"SparseCategoricalCrossentropy": {"from_logits": True}}.get(told.loss, {})
    return getattr(keras.losses, told.loss)(**options, **more)
