"""Dense and convolution layers divided by outputs or inputs, and normalisations between them.

        x ─ Column ─ Channels, activation ─ Row ─ y        one sum forward, one backward

A slice of one layer's outputs is exactly a slice of the next layer's inputs, so no messages are
needed between these two layers.
"""

from __future__ import annotations

from typing import ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.slice import LayerSlice, like
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import WeightShard


class ColumnParallel(LayerSlice):
    r"""A slice of a Dense or Conv2D layer's outputs: \(y_i = f(x W_i + b_i)\) for slice i.

    Args:
        layer: The whole Dense or Conv2D layer, built.
        link: The collectives between the ranks that have the layer's slices.
        joined: Whether to gather the outputs of all slices, because the next layer reads all of
            them.
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
        """Return this slice's outputs (…, local), or all outputs (…, length) if `joined` is set."""
        y = self.inner(self.link.spread(x))
        if self.joined:
            y = self.link.join(y, self.length)
        return self.activation(y)

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return this slice's kernel and bias, each paired with the layer's whole weight."""
        weights = zip(layer.weights, self.inner.weights, strict=True)
        return [WeightShard(whole, local, (..., self.local_units)) for whole, local in weights]


class Row(LayerSlice):
    r"""A slice of a Dense or Conv2D layer's inputs: \(y = f(\sum_i x_i W_i + b)\) for slices i.

    The bias is not divided: each rank adds the whole bias once, after the sum over the slices.
    """

    kind = "inputs"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.kernel.shape[-2])
        outputs = layer.kernel.shape[-1]
        self.inner = _linear(layer, self.local_units.stop - self.local_units.start, outputs, False)
        self.bias, self.activation = layer.bias, layer.activation
        self.fill(layer)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Return the layer's outputs, summed over all slices; x is only this slice's inputs."""
        y = self.link.total(self.inner(x))
        if self.bias is not None:
            y += tf.cast(self.bias, y.dtype)
        return self.activation(y)

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return this slice's kernel, paired with the whole kernel, which is divided by inputs."""
        return [WeightShard(layer.kernel, self.inner.kernel, (..., self.local_units, slice(None)))]


class Channels(LayerSlice):
    """A slice of the channels of a BatchNormalization layer; its statistics need no messages.

    A BatchNormalization layer is divided only if it is between a `ColumnParallel` and a `Row`
    layer.
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
        """Return the normalised channels (…, local) of this slice."""
        return self.inner(x, training=training, mask=mask)

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return the slice's scale, shift, mean and variance, each paired with the whole weight."""
        weights = zip(layer.weights, self.inner.weights, strict=True)
        return [WeightShard(whole, local, (self.local_units,)) for whole, local in weights]


def _linear(layer: keras.Layer, inputs: int, outputs: int, bias: bool) -> keras.Layer:
    """Return a built Dense or Conv2D layer with other numbers of inputs and outputs."""
    size = {ColumnParallel.cuts[type(layer)]: outputs}
    copy = like(layer, **size, use_bias=bias, activation=None)
    copy.build((*[None] * (len(layer.kernel.shape) - 1), inputs))
    return copy
