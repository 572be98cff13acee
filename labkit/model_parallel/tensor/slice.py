"""The base class of slices of all kinds of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras

from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import WeightShard

if TYPE_CHECKING:
    from keras.src.ops.node import Node


class LayerSlice(keras.layers.Layer):
    """Some units of a layer, used in place of the layer in a model.

    Subclasses define the layers that they divide and their part of the weights. The initial weights
    are those of the whole layer.

    Args:
        layer: The whole layer, built.
        link: The collectives between the slices of the layer.
        units: Number of units of the whole layer.
        autocast: Whether Keras casts inputs to the layer's compute dtype.

    Attributes:
        cuts: Divisible layer classes, each with the name of the field that counts its units.
        needs: Fields of the layer, with the values that they must have so that it can be divided.
        kind: Name of the kind of division in `run.layers`.
        local_units: Range of the units in this slice.
    """

    cuts: ClassVar[dict[type[keras.Layer], str]] = {}
    needs: ClassVar[dict[str, bool | int | str]] = {}
    kind: ClassVar[str]

    def __init__(self, layer: keras.Layer, link: Link, units: int, autocast: bool = True) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, autocast=autocast)
        self.link, self.local_units = link, link.local_range(units)
        self.supports_masking = layer.supports_masking

    def fill(self, layer: keras.Layer) -> None:
        """Copy the weights of the whole layer; all variables of the slice must exist."""
        for pair in self.pairs(layer):
            pair.copy_from_whole()
        # Keras propagates `trainable` to sublayers and variables that exist at this point.
        self.trainable = layer.trainable
        self.built = True

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return each weight of this slice, with the whole weight and the position in it.

        Weights that stay whole are omitted.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define pairs()")

    @staticmethod
    def why_not(layer: keras.Layer, node: Node) -> str:
        """Return why a call of the layer cannot be divided; "" if it can."""
        return ""


def like(layer: keras.Layer, **changes: Any) -> keras.Layer:
    """Return an unbuilt copy of the layer with some fields changed and weights of zero."""
    initializers = {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
    return type(layer).from_config(layer.get_config() | initializers | changes)
