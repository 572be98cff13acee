"""An Embedding and a softmax cross-entropy, whose words or classes are divided among ranks."""

from __future__ import annotations

from typing import ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.slice import LayerSlice
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import WeightShard


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

    The loss is \(\log \sum_i \sum_{v \in i} e^{s_v - m} + m - s_y\), with sums over the slices i
    and their classes v. The slices exchange three values per sample: the maximum score m, the sum
    of the exponentials, and the score \(s_y\) of the target class y.

    Args:
        link: The collectives between the ranks that have the slices.
        classes: Total number of classes, summed over all slices.
        y: Target classes, shape (…) or (…, 1).
        scores: Scores (logits) of this slice's classes.
    """
    local = link.local_range(classes)
    target = tf.cast(tf.reshape(y, tf.shape(scores)[:-1]), tf.int32) - local.start
    highest = tf.reduce_max(tf.stop_gradient(scores), axis=-1, keepdims=True)
    # `join` gathers one value (the maximum score) per slice, as if the layer had `size` units.
    most = tf.reduce_max(tf.stop_gradient(link.join(highest, link.size)), axis=-1)
    total = link.total(tf.reduce_sum(tf.exp(scores - most[..., None]), axis=-1))
    # If the target class belongs to another slice, its one-hot row contains only zeros.
    hot = tf.one_hot(target, local.stop - local.start, dtype=scores.dtype)
    return tf.math.log(total) + most - link.total(tf.reduce_sum(scores * hot, axis=-1))
