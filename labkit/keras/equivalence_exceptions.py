"""What differs from one process by nature, however right the exchange is: which layer, and why."""

from __future__ import annotations

from dataclasses import dataclass

import keras


@dataclass(frozen=True)
class Division:
    """Into what a batch is divided.

    Attributes:
        replicas: each sees rows of its own.
        microbatches: whether each takes its rows a part at a time.
        known: whether it is known how many rows layers see at a time.
        synchronizes: whether a synchronized normalization sees the parts of all replicas.
    """

    replicas: int
    microbatches: bool
    known: bool = True
    synchronizes: bool = False

    @property
    def whole(self) -> bool:
        """Whether layers see all rows of a batch at once, as in one process."""
        return self.known and self.replicas == 1 and not self.microbatches


def why_not(model: keras.Model, divided: Division) -> str | None:
    """Why this model's weights differ from those of one process; None: they must not."""
    if type(model).train_step is not keras.Model.train_step:
        return "the model has a train_step of its own, which need not be a mean over samples"
    for layer in model._flatten_layers(include_self=False):
        if reason := _of_layer(layer, divided):
            return f"layer {layer.name!r} ({type(layer).__name__}) {reason}"
    return None


def _of_layer(layer: keras.layers.Layer, divided: Division) -> str | None:
    if draws(layer):
        return "draws random numbers on each rank, other ones than one process"
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        if divided.microbatches:
            return "normalises by each micro-batch, one process by the whole batch"
        if not (divided.whole or (divided.synchronizes and layer.synchronized)):
            return "normalises by each rank's own batch, one process by the whole one"
    if isinstance(layer, keras.layers.SpectralNormalization) and divided.microbatches:
        return "updates its vector once a micro-batch, in one process once a batch"
    return None


def draws(layer: keras.layers.Layer) -> bool:
    """Whether it draws numbers; a recurrent cell has a generator also where it drops nothing."""
    shares = [
        getattr(layer, name)
        for name in ("rate", "stddev", "dropout", "recurrent_dropout")
        if hasattr(layer, name)
    ]
    # Augmenting layers and those of users name their generator as they like.
    generator = any(isinstance(own, keras.random.SeedGenerator) for own in vars(layer).values())
    return generator and (any(shares) or not shares)
