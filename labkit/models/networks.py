"""The small models, which all end in scores without an activation (logits)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.options import Count
from labkit.datasets import Shapes
from labkit.models.unbuilt import ModelOptions, dense_plane, window_plane
from labkit.schedules.grid import Layer

if TYPE_CHECKING:
    import keras

Activation = Annotated[
    Literal["relu", "gelu", "tanh", "sigmoid", "elu", "selu", "silu", "softplus"],
    Field(description="relu, gelu, tanh, sigmoid, elu, selu, silu or softplus"),
]


class LinearOptions(ModelOptions):
    """`linear` has no options."""

    @property
    def blocks(self) -> int:
        """Two layers: one that flattens, and the scores."""
        return 2

    def widest(self, shapes: Shapes) -> int:
        """The scores."""
        return shapes.outputs

    def hidden(self, layers: list[Layer]) -> list[Layer]:
        """No layer but the scores."""
        return layers


class MlpOptions(ModelOptions):
    """Options of `mlp`."""

    widths: tuple[Count, ...] = Field(
        (128, 64), description="units of each hidden layer, whole numbers from 1, such as [128, 64]"
    )
    activation: Activation = "relu"
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped, 0 to below 1")

    @property
    def blocks(self) -> int:
        """Layers: those that are hidden, one that flattens before them, the scores behind them."""
        # A Dropout is a layer of its own, between which and the next a model may be cut.
        return len(self.widths) * (2 if self.dropout else 1) + 2

    def widest(self, shapes: Shapes) -> int:
        """The widest hidden layer, or the scores."""
        # The 1 for a model without hidden layers: `max` wants two values at least.
        return max(*self.widths, shapes.outputs, 1)

    def hidden(self, layers: list[Layer]) -> list[Layer]:
        """A layer for each width."""
        if self.dropout:
            raise InvalidInput(
                f"dropout={self.dropout}: machines of a grid would not drop the same units; "
                "use dropout=0"
            )
        for width in self.widths:
            # A new list: the names of layers count those that stand before them.
            layers = [*layers, dense_plane(layers, width)]
        return layers


class CnnOptions(ModelOptions):
    """Options of `cnn`."""

    filters: tuple[Count, ...] = Field(
        (32, 64),
        min_length=1,
        description="filters of each convolution, whole numbers from 1, such as [32, 64]",
    )
    dense: Count = Field(128, description="units of the hidden layer, 1 or more")

    @property
    def smallest(self) -> int:
        """Height and width, in pixels, below which the pooled image is empty."""
        # Each convolution without padding takes a row and a column at each side; pooling wants two.
        return 2 * len(self.filters) + 2

    @property
    def blocks(self) -> int:
        """Layers: convolutions, pooling, flattening, the hidden one, the scores."""
        return len(self.filters) + 4

    def widest(self, shapes: Shapes) -> int:
        """Filters, hidden units or scores."""
        return max(*self.filters, self.dense, shapes.outputs)

    def hidden(self, layers: list[Layer]) -> list[Layer]:
        """Convolutions, pooling, the hidden one; to flatten moves nothing."""
        for filters in self.filters:
            layers = [*layers, window_plane("conv2d", layers, filters, 3, 1)]
        channels = self.filters[-1]
        layers = [*layers, window_plane("max_pooling2d", layers, channels, 2, 2, trains=False)]
        return [*layers, dense_plane(layers, self.dense)]


class RnnOptions(ModelOptions):
    """Options of `rnn`."""

    sequences: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    cell: Literal["lstm", "gru"] = Field("lstm", description="lstm or gru")
    units: Count = Field(128, description="units of a cell, 1 or more")
    layers: Count = Field(1, description="recurrent layers behind each other, 1 or more")
    embedding: Count = Field(64, description="length of a character's vector, 1 or more")

    @property
    def blocks(self) -> int:
        """The recurrent layers, what stands before them, the scores."""
        return self.layers + 2

    def widest(self, shapes: Shapes) -> int:
        """The scores: recurrent layers are not cut."""
        return shapes.outputs


class LocallyConnectedOptions(ModelOptions):
    """Options of `locally_connected`."""

    filters: tuple[Count, ...] = Field(
        (8, 8),
        min_length=1,
        description="filters of each layer, whole numbers from 1, such as [8, 8]",
    )
    kernel: Count = Field(3, description="rows and columns of each kernel, 1 or more")
    stride: Count = Field(1, description="from a kernel to the next, 1 to kernel")
    activation: Activation = "relu"

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
            # Backwards, from one place of the last layer: what each layer needs of the one before.
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


def linear(options: LinearOptions, shapes: Shapes) -> keras.Model:
    """Return x W + b: a softmax or linear regression."""
    return _sequential("linear", shapes, [], flat=True)


def mlp(options: MlpOptions, shapes: Shapes) -> keras.Model:
    """Return dense layers of the given widths, each followed by dropout when asked."""
    from keras import layers

    hidden: list[keras.Layer] = []
    for width in options.widths:
        hidden.append(layers.Dense(width, activation=options.activation))
        if options.dropout:
            hidden.append(layers.Dropout(options.dropout))
    return _sequential("mlp", shapes, hidden, flat=True)


def cnn(options: CnnOptions, shapes: Shapes) -> keras.Model:
    """Return 3x3 convolutions without padding, one 2x2 max-pool, one dense layer.

    With the defaults on (28, 28, 1): 1,199,882 parameters, the CNN of Keras's own MNIST example.
    """
    from keras import layers

    hidden = [layers.Conv2D(filters, 3, activation="relu") for filters in options.filters]
    hidden += [layers.MaxPooling2D(2), layers.Flatten()]
    hidden += [layers.Dense(options.dense, activation="relu")]
    return _sequential("cnn", shapes, hidden)


def rnn(options: RnnOptions, shapes: Shapes) -> keras.Model:
    """Return recurrent layers over time steps, one behind the other.

    Characters are embedded, and every step has scores (steps, outputs). Of other data the first
    axis is time (rows of an image, columns of a table), and the last step alone has scores.
    """
    from keras import layers

    cell = {"lstm": layers.LSTM, "gru": layers.GRU}[options.cell]
    each = shapes.task == "next_character"
    if each:
        hidden = [layers.Embedding(shapes.outputs, options.embedding)]
    else:
        hidden = [layers.Reshape((shapes.input_shape[0], -1))]
    # All but the last hand every step on to the next layer.
    hidden += [cell(options.units, return_sequences=True) for _ in range(options.layers - 1)]
    hidden += [cell(options.units, return_sequences=each)]
    return _sequential("rnn", shapes, hidden)


def locally_connected(options: LocallyConnectedOptions, shapes: Shapes) -> keras.Model:
    """Return locally connected layers without padding, then a dense layer of scores.

    Source: J. Dean et al.: Large scale distributed deep networks, NIPS 2012; its Figure 1 draws
    layers of this kind over four machines. Differs from it: no pooling or normalisation between.
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
    # Integers for characters: an embedding looks them up.
    first: list[keras.KerasTensor | keras.Layer] = [
        keras.Input(shapes.input_shape, dtype="int32" if codes else None)
    ]
    if flat:
        first.append(keras.layers.Flatten())
    return keras.Sequential([*first, *hidden, keras.layers.Dense(shapes.outputs)], name=name)
