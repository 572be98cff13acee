"""Small named models, whose outputs are scores without a final activation (logits)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from labkit.common.errors import InvalidInput
from labkit.common.options import Count, Options
from labkit.datasets import Shapes
from labkit.schedules.grid_layers import GridLayer, Shape, window

if TYPE_CHECKING:
    import keras


class ModelOptions(Options):
    """The options of a named model, with properties of the model that follow from its options.

    Each model has its own options class. The options class overrides the properties that are known
    before the model is built.

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
        """Return the maximum of units, filters, words or heads of any layer; None if unknown."""
        return None

    def hidden(self, layers: list[GridLayer]) -> list[GridLayer] | None:
        """Return the layers that a grid of machines divides, up to the last hidden layer.

        Args:
            layers: A list with only the description of the input layer, to which the hidden layers
                are appended.

        Returns: Descriptions of the input layer and the hidden layers. The result is None if a grid
            cannot divide one of the layers.
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
    """Return the name that Keras gives a layer in a process's first model, such as dense_1."""
    count = sum(layer.name.startswith(kind) for layer in layers)
    return f"{kind}_{count}" if count else kind


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
        """Return the list `layers` unchanged, because the model `linear` has no hidden layers."""
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
        # The argument 1 keeps `max` valid for models without hidden layers.
        return max(*self.widths, shapes.outputs, 1)

    def hidden(self, layers: list[GridLayer]) -> list[GridLayer]:
        """Return the list `layers`, extended by a description of each hidden Dense layer."""
        if self.dropout:
            raise InvalidInput(
                f"dropout={self.dropout}: the machines of a grid would drop different units; "
                "use dropout=0"
            )
        for width in self.widths:
            # A layer's Keras name depends on the layers before it. Each description is therefore
            # appended before the next description is created.
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
        """The minimum height and width of an image, in pixels, so that pooling has an output."""
        # Each 3x3 convolution without padding removes two rows and two columns. The 2x2 pooling
        # needs two more rows and two more columns.
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
            # The loop computes the input size of each layer, from last to first. The loop starts at
            # one output position of the last layer.
            size = (size - 1) * self.stride + self.kernel
        return size

    def max_slices(self, shapes: Shapes) -> int:
        """Return the number of output scores, because unshared kernels cannot be sliced."""
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

    With default options and (28, 28, 1) images, the model has 1,199,882 parameters. The default
    model equals the CNN of Keras's MNIST example.
    """
    from keras import layers

    hidden = [layers.Conv2D(filters, 3, activation="relu") for filters in options.filters]
    hidden += [layers.MaxPooling2D(2), layers.Flatten()]
    hidden += [layers.Dense(options.dense, activation="relu")]
    return _sequential("cnn", shapes, hidden)


def rnn(options: RnnOptions, shapes: Shapes) -> keras.Model:
    """Return a model that is a chain of recurrent layers over time steps.

    For text, the model embeds the characters of the input. Scores for text have shape (steps,
    outputs), with one row per time step. For an image, each row is a time step. For a data table,
    each column is a time step. For data other than text, the model returns scores only at the last
    time step.
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
    """Return a model of locally connected layers without padding, followed by a Dense layer.

    Source: J. Dean et al., Large scale distributed deep networks, NIPS 2012, whose Figure 1
        divides locally connected layers among four machines. In contrast to the network of Dean et
        al., the model has no pooling or normalisation between layers.
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


class TransformerOptions(ModelOptions):
    """The options of the model `transformer`: blocks of attention and feed-forward layers."""

    sequences: ClassVar[bool] = True
    codes: ClassVar[bool] = True

    layers: Count = Field(2, description="number of transformer blocks, 1 or more")
    width: Count = Field(64, description="length of a character's embedding vector, 1 or more")
    heads: Count = Field(
        4,
        validate_default=True,
        description="number of attention heads, a divisor of width, such as 4 for width 64",
    )
    feed_forward: Count = Field(
        256, description="hidden units of the feed-forward layers, 1 or more"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate of each layer's output, 0 to below 1"
    )

    @property
    def blocks(self) -> int:
        """The number of pipeline blocks: embedding, two per layer, final norm, and output layer."""
        return 2 * self.layers + 3

    def max_slices(self, shapes: Shapes) -> int:
        """Return the largest number of slices that any layer allows."""
        return max(shapes.outputs, *shapes.input_shape, self.feed_forward, self.width, self.heads)

    @field_validator("heads")
    @classmethod
    def _divides(cls, heads: int, info: ValidationInfo) -> int:
        if info.data.get("width", heads) % heads:
            raise ValueError("not a divisor")
        return heads


def transformer(options: TransformerOptions, shapes: Shapes) -> keras.Model:
    r"""Return a transformer of causal self-attention and feed-forward blocks for text.

        codes ─ words + positions ─┬─ norm ─ attention ─ add ─┬─ norm ─ dense ─ dense ─ add ─ …
                                   └──────────────────────┘   └───────────────────────┘

    Each half of a block computes \(x + f(\mathrm{norm}(x))\), where f is attention or two Dense
    layers. The model ends with a norm and a Dense layer of scores. The positions of the characters
    have learned embeddings. Each character attends to itself and to earlier characters.

    Source: A. Vaswani et al., 2017, arXiv 1706.03762. A norm precedes each attention layer and each
    pair of Dense layers, as in Xiong et al., 2020, arXiv 2002.04745.
    """
    import keras
    from keras import layers

    steps = shapes.input_shape[0]
    codes = keras.Input(shapes.input_shape, dtype="int32", name="codes")
    # One row of position numbers, shape (1, characters), is used for all rows of a batch. Standard
    # Keras operations compute the position numbers, so that a saved model can be opened without
    # labkit.
    places = keras.ops.cumsum(keras.ops.ones_like(codes[:1, :]), axis=1) - 1
    words = layers.Embedding(shapes.outputs, options.width, name="words")(codes)
    x = words + layers.Embedding(steps, options.width, name="positions")(places)
    for number in range(1, options.layers + 1):
        x = _block(options, x, number)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(codes, layers.Dense(shapes.outputs, name="scores")(x), name="transformer")


def _block(options: TransformerOptions, x: keras.KerasTensor, number: int) -> keras.KerasTensor:
    from keras import layers

    def add(half: str, y: keras.KerasTensor) -> keras.KerasTensor:
        # With a dropout rate of 0, the model gets no Dropout layer. A Dropout layer would count as
        # a pipeline block.
        y = layers.Dropout(options.dropout)(y) if options.dropout else y
        return layers.Add(name=f"{half}_add_{number}")([x, y])

    attention = layers.MultiHeadAttention(
        options.heads, options.width // options.heads, name=f"attention_{number}"
    )
    y = layers.LayerNormalization(name=f"attention_norm_{number}")(x)
    x = add("attention", attention(y, y, use_causal_mask=True))
    y = layers.LayerNormalization(name=f"feed_forward_norm_{number}")(x)
    y = layers.Dense(options.feed_forward, "gelu", name=f"feed_forward_in_{number}")(y)
    return add("feed_forward", layers.Dense(options.width, name=f"feed_forward_out_{number}")(y))
