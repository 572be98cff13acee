"""Dense and convolution layers cut by outputs or by inputs, and normalisation between such a pair.

        x ─ Column ─ Channels, activation ─ Row ─ y        one sum forward, one backward

A slice of the outputs of one layer is a slice of the inputs of the next: nothing crosses between.
"""

from __future__ import annotations

from typing import ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.slice import Slice, like
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import Pair


class Column(Slice):
    r"""Some outputs of a Dense or Conv2D layer: \(y_i = f(x W_i + b_i)\).

    Args:
        layer: the whole one, built.
        link: to the other slices.
        joined: whether the outputs of all slices are gathered, for a layer that needs them all.
    """

    cuts: ClassVar = {keras.layers.Dense: "units", keras.layers.Conv2D: "filters"}
    needs: ClassVar = {"groups": 1, "data_format": "channels_last"}
    kind = "outputs"

    def __init__(self, layer: keras.Layer, link: Link, joined: bool = False) -> None:
        super().__init__(layer, link, layer.kernel.shape[-1])
        inputs, self.length = layer.kernel.shape[-2:]
        self.inner = _linear(layer, inputs, self.own.stop - self.own.start, layer.use_bias)
        self.joined, self.activation = joined, layer.activation
        self.fill(layer)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """The own outputs (…, own), or all of them (…, length)."""
        y = self.inner(self.link.spread(x))
        if self.joined:
            y = self.link.join(y, self.length)
        return self.activation(y)

    def pairs(self, layer: keras.Layer) -> list[Pair]:
        """Kernel and bias, by outputs."""
        weights = zip(layer.weights, self.inner.weights, strict=True)
        return [Pair(whole, own, (..., self.own)) for whole, own in weights]


class Row(Slice):
    r"""Some inputs of a Dense or Conv2D layer: \(y = f(\sum_i x_i W_i + b)\).

    The bias is that of the whole layer, added once, on every slice.
    """

    kind = "inputs"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.kernel.shape[-2])
        outputs = layer.kernel.shape[-1]
        self.inner = _linear(layer, self.own.stop - self.own.start, outputs, False)
        self.bias, self.activation = layer.bias, layer.activation
        self.fill(layer)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """All outputs, of the own inputs (…, own)."""
        y = self.link.total(self.inner(x))
        if self.bias is not None:
            y += tf.cast(self.bias, y.dtype)
        return self.activation(y)

    def pairs(self, layer: keras.Layer) -> list[Pair]:
        """The kernel, by inputs."""
        return [Pair(layer.kernel, self.inner.kernel, (..., self.own, slice(None)))]


class Channels(Slice):
    """Some channels of a BatchNormalization: each has its own mean and variance, nothing crosses.

    It is cut where it stands between a pair, never by itself.
    """

    kind = "channels"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.moving_mean.shape[0])
        shape = layer.get_build_config()["input_shape"]
        self.inner = type(layer).from_config(layer.get_config())
        self.inner.build((*shape[:-1], self.own.stop - self.own.start))
        self.fill(layer)

    def call(
        self, x: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """The own channels (…, own), normalised."""
        return self.inner(x, training=training, mask=mask)

    def pairs(self, layer: keras.Layer) -> list[Pair]:
        """Scale and shift, mean and variance, by channels."""
        weights = zip(layer.weights, self.inner.weights, strict=True)
        return [Pair(whole, own, (self.own,)) for whole, own in weights]


def _linear(layer: keras.Layer, inputs: int, outputs: int, bias: bool) -> keras.Layer:
    """A linear layer of another size, built, without an activation."""
    size = {Column.cuts[type(layer)]: outputs}
    found = like(layer, **size, use_bias=bias, activation=None)
    found.build((*[None] * (len(layer.kernel.shape) - 1), inputs))
    return found
