"""A small transformer that returns scores of the next character, for each character of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from labkit.common.options import Count
from labkit.datasets import Shapes
from labkit.models.unbuilt import ModelOptions

if TYPE_CHECKING:
    import keras


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
        """Return the largest number of words, positions, hidden units or heads in any layer."""
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

    Source: A. Vaswani et al., 2017, arXiv 1706.03762; norms first as in R. Xiong et al., 2020,
    arXiv 2002.04745.
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
        # With a dropout rate of 0, no Dropout layer is added, because each layer counts as a
        # pipeline block.
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
