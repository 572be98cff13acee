"""Dense and convolution layers divided by outputs or by inputs, and normalisation between them.

        x ─ Column ─ Channels, activation ─ Row ─ y        one sum forward, one backward

A slice of one layer's outputs is a slice of the next layer's inputs, so no message is needed
between the two layers.
"""

from __future__ import annotations

from typing import ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.slice import LayerSlice, like
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import WeightShard


class ColumnParallel(LayerSlice):
    r"""Some outputs of a Dense or Conv2D layer: \(y_i = f(x W_i + b_i)\).

    Args:
        layer: The whole layer, built.
        link: The collectives between the slices of the layer.
        joined: Whether the outputs of all slices are gathered, for a next layer that needs them.
    """

    cuts: ClassVar = {keras.layers.Dense: "units", keras.layers.Conv2D: "filters"}
    needs: ClassVar = {"groups": 1, "data_format": "channels_last"}
    kind = "outputs"

    def __init__(self, layer: keras.Layer, link: Link, joined: bool = False) -> None:
        super().__init__(layer, link, layer.kernel.shape[-1])
        inputs, self.length = layer.kernel.shape[-2:]
        self.inner = _linear(
            layer, inputs, self.local_units.stop - self.local_units.start, layer.use_bias
        )
        self.joined, self.activation = joined, layer.activation
        self.fill(layer)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Return this slice's outputs (…, local), or all outputs (…, length) if joined."""
        y = self.inner(self.link.spread(x))
        if self.joined:
            y = self.link.join(y, self.length)
        return self.activation(y)

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return kernel and bias, divided by outputs."""
        weights = zip(layer.weights, self.inner.weights, strict=True)
        return [WeightShard(whole, local, (..., self.local_units)) for whole, local in weights]


class Row(LayerSlice):
    r"""Some inputs of a Dense or Conv2D layer: \(y = f(\sum_i x_i W_i + b)\).

    After the sum over all slices, every slice adds the whole bias once.
    """

    kind = "inputs"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.kernel.shape[-2])
        outputs = layer.kernel.shape[-1]
        self.inner = _linear(layer, self.local_units.stop - self.local_units.start, outputs, False)
        self.bias, self.activation = layer.bias, layer.activation
        self.fill(layer)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Return all outputs from this slice's inputs (…, local)."""
        y = self.link.total(self.inner(x))
        if self.bias is not None:
            y += tf.cast(self.bias, y.dtype)
        return self.activation(y)

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return the kernel, divided by inputs."""
        return [WeightShard(layer.kernel, self.inner.kernel, (..., self.local_units, slice(None)))]


class Channels(LayerSlice):
    """Some channels of a BatchNormalization, whose statistics per channel need no messages.

    The layer is divided only between a `ColumnParallel` and a `Row` layer, never alone.
    """

    kind = "channels"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.moving_mean.shape[0])
        shape = layer.get_build_config()["input_shape"]
        self.inner = type(layer).from_config(layer.get_config())
        self.inner.build((*shape[:-1], self.local_units.stop - self.local_units.start))
        self.fill(layer)

    def call(
        self, x: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return this slice's normalised channels (…, local)."""
        return self.inner(x, training=training, mask=mask)

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return scale, shift, mean and variance, divided by channels."""
        weights = zip(layer.weights, self.inner.weights, strict=True)
        return [WeightShard(whole, local, (self.local_units,)) for whole, local in weights]


def _linear(layer: keras.Layer, inputs: int, outputs: int, bias: bool) -> keras.Layer:
    """Return a built linear layer of another size, without an activation."""
    size = {ColumnParallel.cuts[type(layer)]: outputs}
    copy = like(layer, **size, use_bias=bias, activation=None)
    copy.build((*[None] * (len(layer.kernel.shape) - 1), inputs))
    return copy
