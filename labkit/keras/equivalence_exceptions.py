"""Layers and optimizers with which even exact data parallelism differs from one process."""

from __future__ import annotations

from dataclasses import dataclass

import keras
import tensorflow as tf

from labkit.keras.lars import LARS

# Optimizers whose update of a word's embedding depends only on the sum of all gradients of the
# word.
_ADDING = (keras.optimizers.SGD, keras.optimizers.Lion, LARS)


@dataclass(frozen=True)
class Division:
    """The division of a batch among replicas and micro-batches.

    Attributes:
        replicas: Number of replicas; each replica trains on different samples.
        microbatches: Whether each replica divides its samples into micro-batches.
        known: Whether it is known how many samples a layer processes at once.
        synchronizes: Whether layers with synchronized=True normalize over the samples of all
            replicas.
    """

    replicas: int
    microbatches: bool
    known: bool = True
    synchronizes: bool = False

    @property
    def is_whole_batch(self) -> bool:
        """Whether each layer processes all samples of a batch at once, as in one process."""
        return self.known and self.replicas == 1 and not self.microbatches


def why_not(model: keras.Model, divided: Division) -> str | None:
    """Return why trained weights may differ from training in one process; None if they do not."""
    if type(model).train_step is not keras.Model.train_step:
        return "the model has a custom train_step, whose loss need not be a mean over samples"
    for layer in model._flatten_layers():
        if reason := _of_layer(layer, divided):
            return f"layer {layer.name!r} ({type(layer).__name__}) {reason}"
    return None


def embedding_difference(model: keras.Model) -> str | None:
    """Return why embedding weights may differ from plain Keras, or None if they are equal.

    Plain Keras passes one gradient row for each occurrence of a word to the optimizer; labkit
    passes the sum of these rows. The sum gives another step if the optimizer squares or clips
    gradients.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    adds = type(optimizer).update_step in (
        optimizer_class.update_step for optimizer_class in _ADDING
    )
    if (
        adds and not clips
        # Accumulated gradients are dense, so occurrences of a word are summed in plain Keras, too.
    ) or optimizer.gradient_accumulation_steps:
        return None
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Embedding) and layer.trainable:
            # A regularizer makes gradients dense, so plain Keras sums them, too.
            if layer.embeddings_regularizer is not None:
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
    """Return why a traced step may differ from training in one process: it draws random numbers.
    Return None if the step draws no random numbers."""
    drawing = ("Random", "TruncatedNormal", "Multinomial")
    for operation in graph.get_operations():
        if any(kind in operation.type for kind in drawing):
            return f"{operation.name!r} draws random numbers on each rank, unlike one process"
    return None


def draws(layer: keras.layers.Layer) -> bool:
    """Return whether a layer draws random numbers in training.

    A seed generator alone proves nothing, because recurrent cells have one even without dropout.
    """
    shares = [
        getattr(layer, name)
        for name in ("rate", "stddev", "dropout", "recurrent_dropout")
        if hasattr(layer, name)
    ]
    # The generator is found by its type, because augmentation layers and custom layers may give it
    # any name.
    generator = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return generator and (any(shares) or not shares)
