"""Small named models, whose outputs are scores without a final activation (logits)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.options import Count
from labkit.datasets import Shapes
from labkit.models.unbuilt import ModelOptions, dense_plane, window_plane
from labkit.schedules.grid import GridLayer

if TYPE_CHECKING:
    import keras

Activation = Annotated[
    Literal["relu", "gelu", "tanh", "sigmoid", "elu", "selu", "silu", "softplus"],
    Field(description="relu, gelu, tanh, sigmoid, elu, selu, silu or softplus"),
]


class LinearOptions(ModelOptions):
    """The options class of the model `linear`, which has no options."""

    @property
    def blocks(self) -> int:
        """The number of layers: a Flatten layer, and the Dense layer that returns the scores."""
        return 2

    def max_slices(self, shapes: Shapes) -> int:
        """Return the number of output scores, which are the units of the only Dense layer."""
        return shapes.outputs

    def hidden(self, layers: list[GridLayer]) -> list[GridLayer]:
        """Return the list `layers` unchanged, because this model has no hidden layers."""
        return layers


class MlpOptions(ModelOptions):
    """The options of the model `mlp`: its hidden layers, their activation and dropout."""

    widths: tuple[Count, ...] = Field(
        (128, 64), description="units of each hidden layer, whole numbers from 1, such as [128, 64]"
    )
    activation: Activation = "relu"
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate of hidden units, 0 to below 1"
    )

    @property
    def blocks(self) -> int:
        """The number of layers: Flatten, hidden layers, Dropout layers, and the output layer."""
        # A Dropout counts as a separate layer, because a pipeline may cut the model before and
        # after it.
        return len(self.widths) * (2 if self.dropout else 1) + 2

    def max_slices(self, shapes: Shapes) -> int:
        """Return the largest number of units of any Dense layer, including the output layer."""
        # `max` needs the additional argument 1, because without hidden layers it would receive a
        # single number.
        return max(*self.widths, shapes.outputs, 1)

    def hidden(self, layers: list[GridLayer]) -> list[GridLayer]:
        """Return the list `layers`, extended by a description of each hidden Dense layer."""
        if self.dropout:
            raise InvalidInput(
                f"dropout={self.dropout}: the machines of a grid would drop different units; "
                "use dropout=0"
            )
        for width in self.widths:
            # Each description is appended before the next one is created, because a layer's Keras
            # name depends on the layers before it.
            layers = [*layers, dense_plane(layers, width)]
        return layers


class CnnOptions(ModelOptions):
    """The options of the model `cnn`, a stack of convolutions."""

    filters: tuple[Count, ...] = Field(
        (32, 64),
        min_length=1,
        description="filters of each convolution, whole numbers from 1, such as [32, 64]",
    )
    dense: Count = Field(128, description="units of the hidden layer, 1 or more")

    @property
    def smallest(self) -> int:
        """The minimum height and width of an image, in pixels, for which pooling has an output."""
        # Each 3x3 convolution without padding removes two rows and two columns; the 2x2 pooling
        # needs two more of each.
        return 2 * len(self.filters) + 2

    @property
    def blocks(self) -> int:
        """The number of layers: convolutions, pooling, Flatten, hidden layer, and output layer."""
        return len(self.filters) + 4

    def max_slices(self, shapes: Shapes) -> int:
        """Return the largest number of filters, hidden units or output scores of any layer."""
        return max(*self.filters, self.dense, shapes.outputs)

    def hidden(self, layers: list[GridLayer]) -> list[GridLayer]:
        """Return `layers`, extended by descriptions of convolutions, pooling and hidden layer."""
        for filters in self.filters:
            layers = [*layers, window_plane("conv2d", layers, filters, 3, 1)]
        channels = self.filters[-1]
        layers = [*layers, window_plane("max_pooling2d", layers, channels, 2, 2, trains=False)]
        return [*layers, dense_plane(layers, self.dense)]


class RnnOptions(ModelOptions):
    """The options of the model `rnn`, a stack of recurrent layers."""

    sequences: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    cell: Literal["lstm", "gru"] = Field("lstm", description="lstm or gru")
    units: Count = Field(128, description="units of a cell, 1 or more")
    layers: Count = Field(1, description="number of recurrent layers, 1 or more")
    embedding: Count = Field(64, description="length of a character's embedding vector, 1 or more")

    @property
    def blocks(self) -> int:
        """The number of layers: the input layer, the recurrent layers, and the output layer."""
        return self.layers + 2

    def max_slices(self, shapes: Shapes) -> int:
        """Return the number of output scores, because recurrent layers cannot be sliced."""
        return shapes.outputs


class LocallyConnectedOptions(ModelOptions):
    """The options of the model `locally_connected`: convolutions whose kernels are unshared."""

    filters: tuple[Count, ...] = Field(
        (8, 8),
        min_length=1,
        description="filters of each layer, whole numbers from 1, such as [8, 8]",
    )
    kernel: Count = Field(3, description="rows and columns of each kernel, 1 or more")
    stride: Count = Field(
        1, description="distance between neighbouring kernels, from 1 to the kernel size"
    )
    activation: Activation = "relu"

    @field_validator("stride")
    @classmethod
    def _stride(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("kernel", value):
            raise ValueError(
                "a stride above the kernel size skips values; give at most the kernel size"
            )
        return value

    @property
    def blocks(self) -> int:
        """The number of layers: the locally connected layers, Flatten, and the output layer."""
        return len(self.filters) + 2

    @property
    def smallest(self) -> int:
        """The minimum height and width of an image, in pixels, so that all layers have outputs."""
        size = 1
        for _ in self.filters:
            # The loop starts with one output position of the last layer, and computes the input
            # size of each layer, back to the first layer.
            size = (size - 1) * self.stride + self.kernel
        return size

    def max_slices(self, shapes: Shapes) -> int:
        """Return the number of output scores, as layers with unshared kernels have no slices."""
        return shapes.outputs

    def hidden(self, layers: list[GridLayer]) -> list[GridLayer]:
        """Return `layers`, extended by a locally connected layer for each entry of `filters`."""
        kind = "locally_connected2d"
        for filters in self.filters:
            layer = window_plane(kind, layers, filters, self.kernel, self.stride)
            layers = [*layers, layer]
        return layers


def linear(options: LinearOptions, shapes: Shapes) -> keras.Model:
    """Return a model that computes x W + b, for softmax regression or linear regression."""
    return _sequential("linear", shapes, [], flat=True)


def mlp(options: MlpOptions, shapes: Shapes) -> keras.Model:
    """Return a model of Dense layers, each followed by Dropout if the dropout rate is positive."""
    from keras import layers

    hidden: list[keras.Layer] = []
    for width in options.widths:
        hidden.append(layers.Dense(width, activation=options.activation))
        if options.dropout:
            hidden.append(layers.Dropout(options.dropout))
    return _sequential("mlp", shapes, hidden, flat=True)


def cnn(options: CnnOptions, shapes: Shapes) -> keras.Model:
    """Return a model of 3x3 convolutions without padding, a 2x2 max-pooling and a dense layer.

    With default options and (28, 28, 1) images, the model has 1,199,882 parameters and equals the
    CNN of Keras's MNIST example.
    """
    from keras import layers

    hidden = [layers.Conv2D(filters, 3, activation="relu") for filters in options.filters]
    hidden += [layers.MaxPooling2D(2), layers.Flatten()]
    hidden += [layers.Dense(options.dense, activation="relu")]
    return _sequential("cnn", shapes, hidden)


def rnn(options: RnnOptions, shapes: Shapes) -> keras.Model:
    """Return a model that is a chain of recurrent layers over time steps.

    For text, the model embeds the characters and returns scores at every time step: (steps,
    outputs). For other data, the first axis is time: the rows of an image, or the columns of a data
    table. For data other than text, the model returns scores only at the last time step.
    """
    from keras import layers

    cell = {"lstm": layers.LSTM, "gru": layers.GRU}[options.cell]
    is_text = shapes.task == "next_character"
    if is_text:
        hidden = [layers.Embedding(shapes.outputs, options.embedding)]
    else:
        hidden = [layers.Reshape((shapes.input_shape[0], -1))]
    # Every recurrent layer before the last one must return its outputs at every time step.
    hidden += [cell(options.units, return_sequences=True) for _ in range(options.layers - 1)]
    hidden += [cell(options.units, return_sequences=is_text)]
    return _sequential("rnn", shapes, hidden)


def locally_connected(options: LocallyConnectedOptions, shapes: Shapes) -> keras.Model:
    """Return a model of locally connected layers without padding, and a Dense layer of scores.

    Source: J. Source: Dean et al., Large scale distributed deep networks, NIPS 2012, whose Figure 1
        divides locally connected layers among four machines. Unlike the source, this model has no
        pooling or normalisation between layers.
    """
    from keras import layers

    from labkit.models.unshared import LocallyConnected2D

    hidden = [
        LocallyConnected2D(filters, options.kernel, options.stride, options.activation)
        for filters in options.filters
    ]
    return _sequential("locally_connected", shapes, [*hidden, layers.Flatten()])


def _sequential(
    name: str, shapes: Shapes, hidden: list[keras.Layer], flat: bool = False
) -> keras.Model:
    import keras

    codes = shapes.task == "next_character"
    # Character codes are integers, because an Embedding layer uses them as indices.
    first: list[keras.KerasTensor | keras.Layer] = [
        keras.Input(shapes.input_shape, dtype="int32" if codes else None)
    ]
    if flat:
        first.append(keras.layers.Flatten())
    return keras.Sequential([*first, *hidden, keras.layers.Dense(shapes.outputs)], name=name)
