"""The base class of all layer slices for tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras

from labkit.model_parallel.tensor.slice_link import Link
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
        cuts: Layer classes that can be divided, each with the name of the attribute that contains
            its number of units.
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
        """Copy the whole layer's weights to this slice, whose variables must already exist."""
        for pair in self.pairs(layer):
            pair.copy_from_whole()
        # Keras sets `trainable` only for sublayers and variables that already exist.
        self.trainable = layer.trainable
        self.built = True

    def pairs(self, layer: keras.Layer) -> list[WeightShard]:
        """Return each weight of this slice, with the whole weight and the slice's indices in it.

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
