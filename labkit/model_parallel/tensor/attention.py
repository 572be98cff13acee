"""Attention layers whose heads are divided among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.functional import is_masked
from labkit.model_parallel.tensor.slice import LayerSlice, like
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import WeightShard

if TYPE_CHECKING:
    from keras.src.ops.node import Node


class Heads(LayerSlice):
    r"""A slice of the heads of a MultiHeadAttention or GroupQueryAttention layer.

    The output is \(y = \sum_i \mathrm{attention}(x Q_i, x K_i, x V_i) O_i + b\), a sum over the
    slices i. The matrices of queries, keys and values are divided by columns; the matrix of the
    output projection is divided by rows. The bias is not divided: each rank adds the whole bias
    once, after the sum over the slices. With grouped queries, a slice contains some key and value
    heads, and all query heads of these groups.

    Args:
        layer: The whole attention layer, built.
        link: The collectives between the ranks that have the layer's slices.
    """

    cuts: ClassVar = {
        keras.layers.MultiHeadAttention: "num_heads",
        keras.layers.GroupQueryAttention: "num_key_value_heads",
    }
    kind = "heads"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        heads = getattr(layer, self.cuts[type(layer)])
        # If the same tensor is query, key and value, Keras's automatic cast would create three
        # separate tensors.
        super().__init__(layer, link, heads, autocast=False)
        self.heads = heads
        self.inner = _attention(layer, self.local_units.stop - self.local_units.start)
        self.bias = layer._output_dense.bias
        if self.bias is not None:
            del self.inner._output_dense.bias
            self.inner._output_dense.bias = None
        self.fill(layer)

    def call(
        self,
        query: tf.Tensor,
        value: tf.Tensor,
        key: tf.Tensor | None = None,
        attention_mask: tf.Tensor | None = None,
        use_causal_mask: bool = False,
        return_attention_scores: bool = False,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Return vectors (…, width) for queries (…, width); equal inputs need one `spread` call.

        `return_attention_scores` is ignored, because layers that return attention scores are never
        divided.
        """
        inputs = (query, value, value if key is None else key)
        spread = {
            id(x): self.link.spread(tf.cast(x, self.compute_dtype))
            for x in {id(x): x for x in inputs}.values()
        }
        partial_sum = self.inner(
            *(spread[id(x)] for x in inputs),
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask,
            training=training,
        )
        y = self.link.total(partial_sum)
        return y if self.bias is None else y + tf.cast(self.bias, y.dtype)

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return each weight except the output bias, paired with the whole layer's weight."""
        # The output bias is the last weight, and `zip` omits it, because the slice has no bias.
        pairs = zip(layer.weights, self.inner.weights, strict=False)
        return [
            WeightShard(whole, local, self._place(whole.shape, local.shape))
            for whole, local in pairs
        ]

    def _place(self, whole: tuple[int, ...], local: tuple[int, ...]) -> tuple[slice, ...]:
        axis = next(axis for axis, length in enumerate(whole) if length != local[axis])
        # Greater than 1 only for the queries in grouped-query attention.
        width = whole[axis] // self.heads
        return (
            *[slice(None)] * axis,
            slice(self.local_units.start * width, self.local_units.stop * width),
        )

    @staticmethod
    def why_not(layer: keras.Layer, node: Node) -> str:
        """Return why a layer call cannot be divided into slices, or "" if it can be divided."""
        if layer.dropout:
            return f"dropout={layer.dropout} of attention scores would differ from head to head"
        if len(node.outputs) > 1:
            return "it returns its attention scores"
        args, kwargs = node.arguments.args, node.arguments.kwargs
        masks = [*args[3:], *(kwargs.get(f"{role}_mask") for role in ("query", "key", "value"))]
        tensors = node.arguments.keras_tensors
        if any(mask is not None for mask in masks) or any(map(is_masked, tensors)):
            return "its inputs carry masks"
        return ""


def _attention(layer: keras.Layer, heads: int) -> keras.Layer:
    """Return a built copy of an attention layer with another number of heads."""
    changes = {Heads.cuts[type(layer)]: heads}
    if type(layer) is keras.layers.GroupQueryAttention:
        changes["num_query_heads"] = heads * layer.num_query_heads // layer.num_key_value_heads
    copy = like(layer, **changes)
    copy.build_from_config(layer.get_build_config())
    return copy
