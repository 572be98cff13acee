"""Embedding and softmax, of which a slice has some words."""

from __future__ import annotations

from typing import ClassVar

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.slice import Slice
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import Pair


class Words(Slice):
    """Some rows of an Embedding; words of other slices count zero, and the slices add up.

    Args:
        layer: the whole one, built.
        link: to the other slices.
    """

    cuts: ClassVar = {keras.layers.Embedding: "input_dim"}
    needs: ClassVar = {"mask_zero": False}
    kind = "words"

    def __init__(self, layer: keras.Layer, link: Link) -> None:
        super().__init__(layer, link, layer.input_dim)
        shape = (self.own.stop - self.own.start, layer.output_dim)
        self.table = self.add_weight(shape=shape, initializer="zeros", name="table")
        self.fill(layer)

    def call(self, words: tf.Tensor) -> tf.Tensor:
        """Vectors (…, output_dim) of words (…)."""
        place = tf.cast(words, tf.int32) - self.own.start
        here = (place >= 0) & (place < self.table.shape[0])
        table = tf.cast(self.table, self.compute_dtype)
        found = tf.gather(table, tf.where(here, place, 0))
        return self.link.total(tf.where(here[..., None], found, tf.zeros_like(found)))

    def pairs(self, layer: keras.Layer) -> list[Pair]:
        """The table, by words."""
        return [Pair(layer.embeddings, self.table, (self.own,))]


def cross_entropy(link: Link, classes: int, y: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    r"""The loss of each sample, of the scores of the own classes (…, own).

    \(\log \sum_i \sum_{v \in i} e^{s_v - m} + m - s_y\): maximum, sum and the score of the target
    come from all slices, one number a sample each.

    Args:
        link: to the other slices.
        classes: of all slices together.
        y: targets, (…) or (…, 1).
        scores: logits.
    """
    own = link.own(classes)
    target = tf.cast(tf.reshape(y, tf.shape(scores)[:-1]), tf.int32) - own.start
    highest = tf.reduce_max(tf.stop_gradient(scores), axis=-1, keepdims=True)
    # One a slice: joined as if each were one unit of so many.
    most = tf.reduce_max(tf.stop_gradient(link.join(highest, link.size)), axis=-1)
    total = link.total(tf.reduce_sum(tf.exp(scores - most[..., None]), axis=-1))
    hot = tf.one_hot(target, own.stop - own.start, dtype=scores.dtype)  # zeros where elsewhere
    return tf.math.log(total) + most - link.total(tf.reduce_sum(scores * hot, axis=-1))
