"""Attention, of which a slice has some heads."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.graph import units_of
from labkit.model_parallel.tensor.linear import Part
from labkit.model_parallel.tensor.link import Link


class Heads(keras.layers.Layer):
    r"""Some heads of a MultiHeadAttention or GroupQueryAttention layer.

    \(y = \sum_i \mathrm{attention}(x Q_i, x K_i, x V_i) O_i + b\): queries, keys and values are
    projected by columns, the output by rows. The bias is that of the whole layer, added once, on
    every slice. Of grouped queries a slice has some keys and values, and all queries of them.

    Args:
        layer: the whole one, built.
        link: to the other slices.
    """

    def __init__(self, layer: Any, link: Link) -> None:
        # Not cast on the way in: one tensor in three roles would become three.
        super().__init__(name=layer.name, dtype=layer.dtype_policy, autocast=False)
        self.link, self.own, self.heads = link, link.own(units_of(layer)), units_of(layer)
        self.inner = _like(layer, self.own.stop - self.own.start)
        self.bias = layer._output_dense.bias
        if self.bias is not None:
            del self.inner._output_dense.bias
            self.inner._output_dense.bias = None
        for whole, own, axis in self.parts(layer):
            each = whole.shape[axis] // self.heads
            place = [slice(None)] * axis + [slice(self.own.start * each, self.own.stop * each)]
            own.assign(whole.value[tuple(place)])
        self.trainable = layer.trainable
        self.built = True

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        attention_mask: Any = None,
        use_causal_mask: bool = False,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Vectors (…, width) of queries (…, width); a tensor in several roles is spread once.

        Attention whose scores are returned is not cut.
        """
        given = (query, value, value if key is None else key)
        spread = {
            id(x): self.link.spread(tf.cast(x, self.compute_dtype))
            for x in {id(x): x for x in given}.values()
        }
        found = self.inner(
            *(spread[id(x)] for x in given),
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask,
            training=training,
        )
        y = self.link.total(found)
        return y if self.bias is None else y + tf.cast(self.bias, y.dtype)

    def parts(self, layer: Any) -> list[Part]:
        """What is of which whole variable."""
        pairs = zip(layer.weights, self.inner.weights, strict=False)  # the bias comes last
        return [(whole, own, _cut_axis(whole.shape, own.shape)) for whole, own in pairs]


def _like(layer: Any, heads: int) -> Any:
    """A layer of another number of heads, built."""
    config = layer.get_config()
    if isinstance(layer, keras.layers.MultiHeadAttention):
        config["num_heads"] = heads
    else:
        config["num_query_heads"] = heads * layer.num_query_heads // layer.num_key_value_heads
        config["num_key_value_heads"] = heads
    config |= {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
    found = type(layer).from_config(config)
    found.build_from_config(layer.get_build_config())
    return found


def _cut_axis(whole: Any, own: Any) -> int:
    return next(axis for axis, length in enumerate(whole) if length != own[axis])
