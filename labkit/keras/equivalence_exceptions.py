"""Layers and optimizers for which even exact data parallelism differs from one process."""

from __future__ import annotations

from dataclasses import dataclass

import keras
import tensorflow as tf

from labkit.keras.lars import LARS

# Optimizers whose update of a word's embedding depends only on the sum of the word's gradients.
_ADDING = (keras.optimizers.SGD, keras.optimizers.Lion, LARS)


@dataclass(frozen=True)
class Division:
    """The division of a batch among replicas and micro-batches.

    Attributes:
        replicas: Number of replicas, which train different rows.
        microbatches: Whether each replica processes its rows in micro-batches.
        known: Whether the number of rows that a layer processes at once is known.
        synchronizes: Whether layers with synchronized=True normalize over the rows of all replicas.
    """

    replicas: int
    microbatches: bool
    known: bool = True
    synchronizes: bool = False

    @property
    def is_whole_batch(self) -> bool:
        """Whether each layer processes all rows of a batch at once, as in one process."""
        return self.known and self.replicas == 1 and not self.microbatches


def why_not(model: keras.Model, divided: Division) -> str | None:
    """Return why a model's weights may differ from one process; None if they cannot differ."""
    if type(model).train_step is not keras.Model.train_step:
        return "the model has a custom train_step, whose loss need not be a mean over samples"
    for layer in model._flatten_layers():
        if reason := _of_layer(layer, divided):
            return f"layer {layer.name!r} ({type(layer).__name__}) {reason}"
    return None


def embedding_difference(model: keras.Model) -> str | None:
    """Return why an embedding's weights may differ from plain Keras; None if they are equal.

    Plain Keras passes to the optimizer one gradient row for each occurrence of a word, labkit
    passes their sum. An optimizer that squares or clips gradients then takes another step.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    adds = type(optimizer).update_step in (
        optimizer_class.update_step for optimizer_class in _ADDING
    )
    if (
        adds and not clips
    ) or optimizer.gradient_accumulation_steps:  # accumulated gradients are dense
        return None
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Embedding) and layer.trainable:
            if layer.embeddings_regularizer is not None:  # a regularizer makes gradients dense
                continue
            return (
                f"layer {layer.name!r} (Embedding): if a word occurs several times in a batch, "
                f"{type(optimizer).__name__} applies the sum of its gradients on ranks, but each "
                "gradient separately in plain Keras"
            )
    return None


def _of_layer(layer: keras.layers.Layer, divided: Division) -> str | None:
    if draws(layer):
        return "draws random numbers on each rank, which differ from those of one process"
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        if divided.microbatches:
            return "normalises by each micro-batch; one process normalises by the whole batch"
        if not (divided.is_whole_batch or (divided.synchronizes and layer.synchronized)):
            return "normalises by the batch of each rank; one process uses the whole batch"
    if isinstance(layer, keras.layers.SpectralNormalization) and divided.microbatches:
        return "updates its vector once per micro-batch, but in one process once per batch"
    return None


def draws_in_step(graph: tf.Graph) -> str | None:
    """Return why a traced step differs from one process if the step draws random numbers."""
    drawing = ("Random", "TruncatedNormal", "Multinomial")
    for operation in graph.get_operations():
        if any(kind in operation.type for kind in drawing):
            return f"{operation.name!r} draws random numbers on each rank, unlike one process"
    return None


def draws(layer: keras.layers.Layer) -> bool:
    """Return whether a layer draws random numbers in training.

    A seed generator alone is no proof, because recurrent cells have one even without dropout.
    """
    shares = [
        getattr(layer, name)
        for name in ("rate", "stddev", "dropout", "recurrent_dropout")
        if hasattr(layer, name)
    ]
    # Augmentation layers and custom layers may give their generator any name.
    generator = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return generator and (any(shares) or not shares)
