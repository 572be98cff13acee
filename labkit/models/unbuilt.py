"""The properties of a named model that follow from its options, before Keras builds the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from labkit.common.options import Options
from labkit.datasets import Shapes
from labkit.schedules.grid import GridLayer, Shape, window


class ModelOptions(Options):
    """The options of a named model, with properties of the model that follow from its options.

    The options class of each model overrides the properties that are known before the model is
    built.

    Attributes:
        sequences: Whether the model can return predictions at every time step of a sequence.
        codes: Whether the model accepts only sequences of character codes.
        recurrent: Whether the model has recurrent layers.
    """

    sequences: ClassVar[bool] = False
    codes: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False

    @property
    def smallest(self) -> int:
        """The minimum height and width of an image in pixels; 0 if inputs need not be images."""
        return 0

    @property
    def blocks(self) -> int | None:
        """The number of pipeline blocks of the model; None if it is unknown before the build."""
        return None

    def max_slices(self, shapes: Shapes) -> int | None:
        """Return the most units, filters, words or heads of any layer; None if it is unknown."""
        return None

    def hidden(self, layers: list[GridLayer]) -> list[GridLayer] | None:
        """Return the layers that a grid of machines divides, up to the last hidden layer.

        Args:
            layers: A list with only the description of the input layer, to which the hidden layers
                are appended.

        Returns:
            Descriptions of the input layer and the hidden layers, or None if a grid cannot divide
            one of them.
        """
        return None


def first_plane(shapes: Shapes) -> GridLayer:
    """Return the description of the input layer for a grid of machines."""
    input_shape = shapes.input_shape
    shape: Shape = (
        (input_shape[0], input_shape[1], input_shape[2])
        if len(input_shape) == 3
        else (1, 1, prod(input_shape))
    )
    return GridLayer("input", "input", shape, trains=False)


def window_plane(
    kind: str, layers: Sequence[GridLayer], channels: int, k: int, s: int, trains: bool = True
) -> GridLayer:
    """Return the description of a layer with k × k kernels and strides s that follows `layers`."""
    return window(_keras_name(kind, layers), layers[-1].shape, channels, (k, k), (s, s), trains)


def dense_plane(layers: Sequence[GridLayer], units: int) -> GridLayer:
    """Return the description of a Dense layer that follows the layers in `layers`."""
    return GridLayer(_keras_name("dense", layers), "units", (1, 1, units))


def _keras_name(kind: str, layers: Sequence[GridLayer]) -> str:
    """Return the name that Keras gives this layer in the first model of a process, like dense_1."""
    count = sum(layer.name.startswith(kind) for layer in layers)
    return f"{kind}_{count}" if count else kind
