"""Dense and convolution layers, of which a slice has some outputs or some inputs."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.link import Link

Part = tuple[Any, Any, int]  # variable of the whole layer, of the slice, axis along which it is cut


class Column(keras.layers.Layer):
    r"""Some outputs of a Dense or Conv2D layer: \(y_i = f(x W_i + b_i)\).

    Args:
        layer: the whole one, built.
        link: to the other slices.
        joined: whether the outputs of all slices are gathered, for a layer that needs them all.
    """

    def __init__(self, layer: Any, link: Link, joined: bool = False) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        own = link.own(layer.kernel.shape[-1])
        self.inner = _like(layer, layer.kernel.shape[-2], own.stop - own.start, layer.use_bias)
        self.link, self.joined, self.length = link, joined, layer.kernel.shape[-1]
        self.activation, self.trainable = layer.activation, layer.trainable
        self.supports_masking = layer.supports_masking
        self.inner.kernel.assign(layer.kernel.value[..., own])
        if layer.use_bias:
            self.inner.bias.assign(layer.bias.value[own])
        self.built = True

    def call(self, x: Any) -> Any:
        """The own outputs (…, own), or all of them (…, length)."""
        y = self.inner(self.link.spread(x))
        if self.joined:
            y = self.link.join(y, self.length)
        return self.activation(y)

    def parts(self, layer: Any) -> list[Part]:
        """What is of which whole variable."""
        kernel = (layer.kernel, self.inner.kernel, len(layer.kernel.shape) - 1)
        return [kernel, (layer.bias, self.inner.bias, 0)] if layer.use_bias else [kernel]


class Row(keras.layers.Layer):
    r"""Some inputs of a Dense or Conv2D layer: \(y = f(\sum_i x_i W_i + b)\).

    The bias is that of the whole layer, added once, on every slice.

    Args:
        layer: the whole one, built.
        link: to the other slices.
    """

    def __init__(self, layer: Any, link: Link) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        own = link.own(layer.kernel.shape[-2])
        self.inner = _like(layer, own.stop - own.start, layer.kernel.shape[-1], False)
        self.link, self.bias = link, layer.bias
        self.activation, self.trainable = layer.activation, layer.trainable
        self.supports_masking = layer.supports_masking
        self.inner.kernel.assign(layer.kernel.value[..., own, :])
        self.built = True

    def call(self, x: Any) -> Any:
        """All outputs, of the own inputs (…, own)."""
        y = self.link.total(self.inner(x))
        if self.bias is not None:
            y += tf.cast(self.bias, y.dtype)
        return self.activation(y)

    def parts(self, layer: Any) -> list[Part]:
        """What is of which whole variable."""
        return [(layer.kernel, self.inner.kernel, len(layer.kernel.shape) - 2)]


def _like(layer: Any, inputs: int, outputs: int, bias: bool) -> Any:
    """A linear layer of another size, built, without an activation."""
    size = "units" if isinstance(layer, keras.layers.Dense) else "filters"
    config = layer.get_config() | {size: outputs, "use_bias": bias, "activation": None}
    config |= {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
    found = type(layer).from_config(config)
    found.build((*[None] * (len(layer.kernel.shape) - 1), inputs))
    return found
