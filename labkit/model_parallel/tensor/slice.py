"""What the slices of all kinds of layers have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import keras

from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.weights import Pair

if TYPE_CHECKING:
    from keras.src.ops.node import Node


class Slice(keras.layers.Layer):
    """Some units of a layer, in its place in a model.

    A kind of slice says which layers it is of, and what it has of their weights. Its first values
    are those of the whole layer.

    Args:
        layer: the whole one, built.
        link: to the other slices.
        units: of the whole layer.
        autocast: as of every Keras layer.

    Attributes:
        cuts: the layers that are cut so, each with the name of the field that counts its units.
        needs: fields without which they are not, and their values.
        kind: what `run.layers` says.
        own: the units of this slice.
    """

    cuts: ClassVar[dict[type[keras.Layer], str]] = {}
    needs: ClassVar[dict[str, bool | int | str]] = {}
    kind: ClassVar[str]

    def __init__(self, layer: keras.Layer, link: Link, units: int, autocast: bool = True) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, autocast=autocast)
        self.link, self.own = link, link.own(units)
        self.supports_masking = layer.supports_masking

    def fill(self, layer: keras.Layer) -> None:
        """Take the values of the whole layer, when all variables are there."""
        for pair in self.pairs(layer):
            pair.take()
        self.trainable = layer.trainable  # passed on to layers and variables that are here by now
        self.built = True

    def pairs(self, layer: keras.Layer) -> list[Pair]:
        """Which whole weight each own one is of, and where; those that are whole are left out."""
        raise NotImplementedError(f"{type(self).__name__} does not say which weights it has")

    @staticmethod
    def why_not(layer: keras.Layer, node: Node) -> str:
        """Why a call of a layer cannot be cut so; nothing where it can."""
        return ""


def like(layer: keras.Layer, **changes: Any) -> keras.Layer:
    """A layer of the same kind but for some fields; its weights wait for values."""
    first = {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
    return type(layer).from_config(layer.get_config() | first | changes)
