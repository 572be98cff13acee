"""The model of DistBelief's partition over machines: locally connected layers, then scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, ValidationInfo, field_validator

from labkit.common.options import Count
from labkit.datasets import Shapes
from labkit.models.networks import Activation
from labkit.models.unbuilt import ModelOptions, window_plane
from labkit.schedules.grid import Layer

if TYPE_CHECKING:
    import keras


class LocallyConnectedOptions(ModelOptions):
    """Options of `locally_connected`."""

    filters: tuple[Count, ...] = Field(
        (8, 8),
        min_length=1,
        description="filters of each layer, whole numbers from 1, such as [8, 8]",
    )
    kernel: Count = Field(3, description="rows and columns of each kernel, 1 or more")
    stride: Count = Field(1, description="from a kernel to the next, 1 to kernel")
    activation: Activation = Field(
        "relu", description="relu, gelu, tanh, sigmoid, elu, selu, silu or softplus"
    )

    @field_validator("stride")
    @classmethod
    def _stride(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("kernel", value):
            raise ValueError("it jumps over values")
        return value

    @property
    def blocks(self) -> int:
        """Layers: the hidden ones, one that flattens behind them, the scores."""
        return len(self.filters) + 2

    @property
    def smallest(self) -> int:
        """Height and width, in pixels, of which the last layer has one place."""
        size = 1
        for _ in self.filters:
            size = (size - 1) * self.stride + self.kernel
        return size

    def widest(self, shapes: Shapes) -> int:
        """The scores: unshared kernels have no slices."""
        return shapes.outputs

    def hidden(self, layers: list[Layer]) -> list[Layer]:
        """A layer of places for each number of filters."""
        kind = "locally_connected2d"
        for filters in self.filters:
            made = window_plane(kind, layers, filters, self.kernel, self.stride)
            layers = [*layers, made]
        return layers


def locally_connected(options: LocallyConnectedOptions, shapes: Shapes) -> keras.Model:
    """Return locally connected layers without padding, then a dense layer of scores.

    Source: J. Dean et al.: Large scale distributed deep networks, NIPS 2012; its Figure 1 draws
    layers of this kind over four machines. Differs from it: no pooling or normalisation between.
    """
    import keras

    from labkit.models.unshared import LocallyConnected2D

    hidden = [
        LocallyConnected2D(filters, options.kernel, options.stride, options.activation)
        for filters in options.filters
    ]
    layers = [keras.Input(shapes.input_shape), *hidden, keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(shapes.outputs)], name="locally_connected")
