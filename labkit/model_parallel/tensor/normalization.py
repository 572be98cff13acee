"""Batch normalisation, of which a slice has some channels."""

from __future__ import annotations

from typing import Any

import keras

from labkit.model_parallel.tensor.linear import Part
from labkit.model_parallel.tensor.link import Link


class Channels(keras.layers.Layer):
    """Some channels of a BatchNormalization: each has its own mean and variance, nothing crosses.

    Args:
        layer: the whole one, built.
        link: to the other slices.
    """

    def __init__(self, layer: Any, link: Link) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        own = link.own(layer.moving_mean.shape[0])
        shape = layer.get_build_config()["input_shape"]
        self.inner = type(layer).from_config(layer.get_config())
        self.inner.build((*shape[:-1], own.stop - own.start))
        self.link, self.trainable = link, layer.trainable
        for whole, mine, _ in self.parts(layer):
            mine.assign(whole.value[own])
        self.built = True

    def call(self, x: Any, training: bool | None = None, mask: Any = None) -> Any:
        """The own channels (…, own), normalised."""
        return self.inner(x, training=training, mask=mask)

    def parts(self, layer: Any) -> list[Part]:
        """What is of which whole variable."""
        return [(w, own, 0) for w, own in zip(layer.weights, self.inner.weights, strict=True)]
