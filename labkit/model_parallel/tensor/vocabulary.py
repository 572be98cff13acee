"""Embedding and softmax, of which a slice has some words."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from labkit.model_parallel.tensor.linear import Part
from labkit.model_parallel.tensor.link import Link


class Words(keras.layers.Layer):
    """Some rows of an Embedding; words of other slices count zero, and the slices add up.

    Args:
        layer: the whole one, built.
        link: to the other slices.
    """

    def __init__(self, layer: Any, link: Link) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        own = link.own(layer.input_dim)
        self.link, self.first = link, own.start
        shape = (own.stop - own.start, layer.output_dim)
        self.table = self.add_weight(shape=shape, initializer="zeros", name="table")
        self.table.assign(layer.embeddings.value[own])
        self.trainable = layer.trainable
        self.built = True

    def call(self, words: Any) -> Any:
        """Vectors (…, output_dim) of words (…)."""
        place = tf.cast(words, tf.int32) - self.first
        here = (place >= 0) & (place < self.table.shape[0])
        table = tf.cast(self.table, self.compute_dtype)
        found = tf.gather(table, tf.where(here, place, 0))
        return self.link.total(tf.where(here[..., None], found, tf.zeros_like(found)))

    def parts(self, layer: Any) -> list[Part]:
        """What is of which whole variable."""
        return [(layer.embeddings, self.table, 0)]


def cross_entropy(link: Link, classes: int, y: Any, scores: Any) -> Any:
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
