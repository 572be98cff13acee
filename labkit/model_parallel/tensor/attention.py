"""Attention, of which a slice has some heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.functional import is_masked
from labkit.model_parallel.tensor.slice import Slice, like
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import Pair

if TYPE_CHECKING:
    from keras.src.ops.node import Node


class Heads(Slice):
    r"""Some heads of a MultiHeadAttention or GroupQueryAttention layer.

    \(y = \sum_i \mathrm{attention}(x Q_i, x K_i, x V_i) O_i + b\): queries, keys and values are
    projected by columns, the output by rows. The bias is that of the whole layer, added once, on
    every slice. Of grouped queries a slice has some keys and values, and all queries of them.

    Args:
        layer: the whole one, built.
        link: to the other slices.
    """

    cuts: ClassVar = {
        keras.layers.MultiHeadAttention: "num_heads",
        keras.layers.GroupQueryAttention: "num_key_value_heads",
    }
    kind = "heads"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        heads = getattr(layer, self.cuts[type(layer)])
        # Not cast on the way in: one tensor in three roles would become three.
        super().__init__(layer, link, heads, autocast=False)
        self.heads = heads
        self.inner = _attention(layer, self.own.stop - self.own.start)
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

    def pairs(self, layer: keras.Layer) -> list[Pair]:
        """All but the last bias, each along the axis on which it is shorter here."""
        pairs = zip(layer.weights, self.inner.weights, strict=False)  # the bias comes last
        return [Pair(whole, own, self._place(whole.shape, own.shape)) for whole, own in pairs]

    def _place(self, whole: tuple[int, ...], own: tuple[int, ...]) -> tuple[slice, ...]:
        axis = next(axis for axis, length in enumerate(whole) if length != own[axis])
        each = whole[axis] // self.heads  # queries of one key, where they are grouped
        return (*[slice(None)] * axis, slice(self.own.start * each, self.own.stop * each))

    @staticmethod
    def why_not(layer: keras.Layer, node: Node) -> str:
        """Dropout of scores, scores that are asked for, masks."""
        if layer.dropout:
            return f"dropout={layer.dropout} of attention scores would differ from head to head"
        if len(node.outputs) > 1:
            return "its attention scores are asked for"
        args, given = node.arguments.args, node.arguments.kwargs
        masks = [*args[3:], *(given.get(f"{role}_mask") for role in ("query", "key", "value"))]
        tensors = node.arguments.keras_tensors
        if any(mask is not None for mask in masks) or any(map(is_masked, tensors)):
            return "its inputs carry masks"
        return ""


def _attention(layer: keras.Layer, heads: int) -> keras.Layer:
    """A layer of another number of heads, built."""
    changes = {Heads.cuts[type(layer)]: heads}
    if type(layer) is keras.layers.GroupQueryAttention:
        changes["num_query_heads"] = heads * layer.num_query_heads // layer.num_key_value_heads
    found = like(layer, **changes)
    found.build_from_config(layer.get_build_config())
    return found
