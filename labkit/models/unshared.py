"""LocallyConnected2D: a convolution with a separate kernel at each output position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import keras

from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    import tensorflow as tf

    from labkit.common.canonical_json import JSON

# The first axis of a `Shape` is the batch, whose length is unknown (None).
Shape: TypeAlias = tuple[int, ...]


@keras.saving.register_keras_serializable(package="labkit")
class LocallyConnected2D(keras.layers.Layer):
    r"""A convolution with unshared kernels: \(y_{ij} = f(K_{ij} \cdot x_{ij} + b_{ij})\).

    The input \(x_{ij}\) is the part of the image under the kernel \(K_{ij}\) of output position (i,
    j). The part \(x_{ij}\) of the image starts at row \(i s\) and column \(j s\), with stride s.
    Images have shape (batch, rows, columns, channels), and there is no padding. With k × k kernels,
    the weight `kernel` has shape (rows, columns, k·k·channels, filters). The weight `bias` has
    shape (rows, columns, filters). Kernels are initialised by Glorot's uniform rule, which uses the
    numbers of inputs and filters at one position.

    Args:
        filters: The number of outputs at each position.
        kernel_size, strides: Height and width of a kernel, and strides on both axes. A stride is
            the distance of adjacent kernels. A single number holds for both axes.
        activation: The activation function f, as in `keras.layers.Dense`.
        use_bias: Whether each output adds a bias, which is initially zero.

    Raises:
        InvalidInput: A size is below 1, or a kernel is larger than the image.
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        strides: int | tuple[int, int] = 1,
        activation: str | Callable[[tf.Tensor], tf.Tensor] | None = None,
        use_bias: bool = True,
        **options: JSON,
    ) -> None:
        super().__init__(**options)
        self.filters, self.use_bias = filters, use_bias
        self.kernel_size, self.strides = _pair(kernel_size), _pair(strides)
        self.activation = keras.activations.get(activation)
        if min(filters, *self.kernel_size, *self.strides) < 1:
            raise InvalidInput(
                f"filters={filters}, kernel_size={kernel_size}, strides={strides}: give numbers "
                "from 1"
            )

    def build(self, input_shape: Shape) -> None:
        """Create the weights for images of the given shape."""
        if len(input_shape) != 4 or None in input_shape[1:]:
            raise InvalidInput(
                f"{self.name} got {tuple(input_shape)}; give images (batch, rows, columns, "
                "channels) of a known size, because each place has a separate kernel"
            )
        _, rows, columns, filters = self.compute_output_shape(input_shape)
        if min(rows, columns) < 1:
            raise InvalidInput(
                f"{self.name}: a kernel of {self.kernel_size} does not fit on an image of "
                f"{tuple(input_shape[1:3])}"
            )
        inputs = self.kernel_size[0] * self.kernel_size[1] * input_shape[-1]
        # The bound `limit` depends on the inputs of one output position. A Keras initializer would
        # count the inputs of all positions.
        limit = (6 / (inputs + filters)) ** 0.5
        self.kernel = self.add_weight(
            shape=(rows, columns, inputs, filters),
            initializer=keras.initializers.RandomUniform(-limit, limit),
            name="kernel",
        )
        self.bias = None
        if self.use_bias:
            shape = (rows, columns, filters)
            self.bias = self.add_weight(shape=shape, initializer="zeros", name="bias")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Return the outputs (batch, rows, columns, filters) of a batch of images."""
        rows, columns = self.kernel.shape[:2]
        down, across = self.strides
        parts = [
            x[:, i : i + down * (rows - 1) + 1 : down, j : j + across * (columns - 1) + 1 : across]
            for i in range(self.kernel_size[0])
            for j in range(self.kernel_size[1])
        ]
        # `stack` is used because its gradient stores no tensors.
        stacked = keras.ops.stack(parts, axis=3)
        patches = keras.ops.reshape(stacked, (-1, rows, columns, self.kernel.shape[2]))
        y = keras.ops.einsum("bijp,ijpf->bijf", patches, self.kernel)
        return self.activation(y if self.bias is None else y + self.bias)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Return the output shape (batch, rows, columns, filters)."""
        sizes = [
            (size - k) // s + 1
            for size, k, s in zip(input_shape[1:3], self.kernel_size, self.strides, strict=True)
        ]
        return (input_shape[0], *sizes, self.filters)

    def get_config(self) -> dict[str, JSON]:
        """Return the constructor arguments of the layer, for saving."""
        config: dict[str, JSON] = super().get_config()
        return config | {
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
        }


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return int(first), int(second)
