"""Keras layers that are divided into slices, one slice per rank.

Dense and convolution layers are divided by outputs or by inputs, and normalisations between them by
channels.

        x ─ Column ─ Channels, activation ─ Row ─ y        one sum forward, one backward

Each slice of a layer's outputs equals a slice of the next layer's inputs. No messages are needed
between the two sliced layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.functional import is_masked
from labkit.model_parallel.messages import Link
from labkit.model_parallel.weights import WeightShard

if TYPE_CHECKING:
    from keras.src.ops.node import Node


class LayerSlice(keras.layers.Layer):
    """A slice of a layer's units, which replaces the whole layer in one rank's model.

    Subclasses define which layer classes they divide, and which part of the weights a slice
    contains. The slice's initial weights are copied from the whole layer.

    Args:
        layer: The whole layer, built.
        link: The collectives between the ranks that have the layer's slices.
        units: Number of units of the whole layer.
        autocast: Whether Keras automatically casts inputs to the layer's compute dtype.

    Attributes:
        cuts: Layer classes that can be divided. Each class is listed with the attribute that
            contains its number of units.
        needs: Attributes of the layer, with the values that they must have so that it can be
            divided.
        kind: Name of the way in which the layer is divided, shown in the table `run.layers`.
        local_units: Range of the whole layer's units that this slice has.
    """

    cuts: ClassVar[dict[type[keras.Layer], str]] = {}
    needs: ClassVar[dict[str, bool | int | str]] = {}
    kind: ClassVar[str]

    def __init__(self, layer: keras.Layer, link: Link, units: int, autocast: bool = True) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, autocast=autocast)
        self.link, self.local_units = link, link.local_range(units)
        self.supports_masking = layer.supports_masking

    def fill(self, layer: keras.Layer) -> None:
        """Copy the slice's part of each whole weight to the slice's own, existing variable."""
        for pair in self.pairs(layer):
            pair.copy_from_whole()
        # Keras sets `trainable` only for sublayers and variables that already exist.
        self.trainable = layer.trainable
        self.built = True

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return each weight of this slice with its index range in the weight of the whole layer.

        Weights that are not divided, such as the bias of `Row`, are omitted.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define pairs()")

    @staticmethod
    def why_not(layer: keras.Layer, node: Node) -> str:
        """Return why a layer call cannot be divided into slices, or "" if it can be divided."""
        return ""


def like(layer: keras.Layer, **changes: Any) -> keras.Layer:
    """Return an unbuilt copy of a layer, with some settings changed and zeros as weights."""
    initializers = {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
    return type(layer).from_config(layer.get_config() | initializers | changes)


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
        """Pair each weight of the slice with the whole weight of the layer."""
        weights = zip(layer.weights, self.inner.weights, strict=True)
        return [WeightShard(whole, local, (..., self.local_units)) for whole, local in weights]


class Row(LayerSlice):
    r"""A layer slice that computes with a part of the layer's inputs.

    The bias is not divided. Each rank adds the whole bias once, after the sum.
    """

    kind = "inputs"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.kernel.shape[-2])
        outputs = layer.kernel.shape[-1]
        self.inner = _linear(layer, self.local_units.stop - self.local_units.start, outputs, False)
        self.bias, self.activation = layer.bias, layer.activation
        self.fill(layer)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Return the layer's outputs, summed over all slices; x contains this slice's inputs."""
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


class Heads(LayerSlice):
    r"""A slice of the heads of a MultiHeadAttention or GroupQueryAttention layer.

    The output is a sum over the slices i of the heads. The formula of the output is \(y = \sum_i
    \mathrm{attention}(x Q_i, x K_i, x V_i) O_i + b\). The matrices of queries, keys and values are
    divided by columns. The matrix of the output projection is divided by rows. The bias is not
    divided: each rank adds the whole bias once, after the sum over the slices. With grouped
    queries, a slice contains some key and value heads, and all query heads of their groups.

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
        """Return outputs (…, width) for queries (…, width); equal inputs share one `spread` call.

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
        # The function `zip` omits the layer's last weight, the output bias, because the slice has
        # no bias.
        pairs = zip(layer.weights, self.inner.weights, strict=False)
        return [
            WeightShard(whole, local, self._place(whole.shape, local.shape))
            for whole, local in pairs
        ]

    def _place(self, whole: tuple[int, ...], local: tuple[int, ...]) -> tuple[slice, ...]:
        axis = next(axis for axis, length in enumerate(whole) if length != local[axis])
        # For grouped queries, `width` is the number of query heads per key-value head. In all other
        # cases, `width` is 1.
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


class Words(LayerSlice):
    """A slice of an Embedding's words, which returns zero vectors for words of other slices.

    Args:
        layer: The whole Embedding layer, built.
        link: The collectives between the ranks that have the layer's slices.
    """

    cuts: ClassVar = {keras.layers.Embedding: "input_dim"}
    needs: ClassVar = {"mask_zero": False}
    kind = "words"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.input_dim)
        shape = (self.local_units.stop - self.local_units.start, layer.output_dim)
        self.table = self.add_weight(shape=shape, initializer="zeros", name="table")
        self.fill(layer)

    def call(self, words: tf.Tensor) -> tf.Tensor:
        """Return vectors (…, output_dim) for word numbers (…), summed over all slices."""
        place = tf.cast(words, tf.int32) - self.local_units.start
        local = (place >= 0) & (place < self.table.shape[0])
        table = tf.cast(self.table, self.compute_dtype)
        vectors = tf.gather(table, tf.where(local, place, 0))
        return self.link.total(tf.where(local[..., None], vectors, tf.zeros_like(vectors)))

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return this slice's rows of the embedding matrix, paired with the whole matrix."""
        return [WeightShard(layer.embeddings, self.table, (self.local_units,))]


def cross_entropy(link: Link, classes: int, y: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    r"""Return each sample's cross-entropy, computed from the class scores (…, local) of a slice.

    The loss sums over the slices i and their classes v. The formula of the loss is \(\log \sum_i
    \sum_{v \in i} e^{s_v - m} + m - s_y\). The slices exchange the maximum score m and the sum of
    the exponentials. The slices also exchange the score \(s_y\) of the target class y.

    Args:
        link: The collectives between the ranks that have the slices.
        classes: Total number of classes, summed over all slices.
        y: Target classes, shape (…) or (…, 1).
        scores: Scores (logits) of this slice's classes.
    """
    local = link.local_range(classes)
    target = tf.cast(tf.reshape(y, tf.shape(scores)[:-1]), tf.int32) - local.start
    highest = tf.reduce_max(tf.stop_gradient(scores), axis=-1, keepdims=True)
    # The method `join` gathers the maximum score of each slice. For the method `join`, each slice
    # has one unit, its maximum score.
    most = tf.reduce_max(tf.stop_gradient(link.join(highest, link.size)), axis=-1)
    total = link.total(tf.reduce_sum(tf.exp(scores - most[..., None]), axis=-1))
    # If the target class belongs to another slice, its one-hot row contains only zeros.
    hot = tf.one_hot(target, local.stop - local.start, dtype=scores.dtype)
    return tf.math.log(total) + most - link.total(tf.reduce_sum(scores * hot, axis=-1))
