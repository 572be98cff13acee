"""Quantization of a trained model's weights to 8 or 4 bits, by Keras."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, ClassVar, Literal

from labkit.common.errors import InvalidInput
from labkit.datasets import Dataset
from labkit.deployment.smaller_models import CompressedModel, CompressionMethod, uncompiled_copy

if TYPE_CHECKING:
    import keras


class Quantize(CompressionMethod):
    r"""Round kernels to integers of 8 or 4 bits, with one scale factor per output unit.

    A weight is approximated by \(W_{ij} \approx s_j\, q_{ij}\), with the scale \(s_j\) of output
    unit j. The integers \(q_{ij}\) are in \([-127, 127]\) for int8, and in \([-8, 7]\) for int4.
    With int8, a layer's inputs are also rounded at every call. With int4, only weights are rounded.
    Each byte stores two weights, and every 128 inputs share a scale and a zero point. Keras
    quantizes Dense, EinsumDense and Embedding layers. Biases, and layers of other types, such as
    convolutions and recurrent cells, are not changed. The result's field `what` lists the layers
    that are not quantized.

    Args:
        mode: Type of the integers, "int8" or "int4"; default: "int8".

    Source: B. Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, 2018, arXiv 1712.05877; the implementation is
    `keras.Model.quantize` with its default configurations. Difference from the paper: training is
    not quantized, each output unit has a scale, and inputs are scaled at every call by their
    greatest absolute value.
    """

    family: ClassVar[str] = "quantize"
    mode: Literal["int8", "int4"] = "int8"

    @property
    def label(self) -> str:
        """Label of the method, which is its mode: "int8" or "int4"."""
        return self.mode

    def apply(self, model: keras.Model, data: Dataset) -> CompressedModel:
        """Return a quantized copy of the model.

        Raises:
            InvalidInput: Keras quantizes none of the model's layers.
        """
        quantized = uncompiled_copy(model)
        try:
            with warnings.catch_warnings():
                # Keras's warnings about unquantized layers are hidden, because the result's text
                # `what` lists these layers.
                warnings.simplefilter("ignore")
                quantized.quantize(self.mode)
        except ValueError as error:
            raise InvalidInput(
                f"Keras cannot quantize this model to {self.mode}: {error}"
            ) from None
        total_weights, quantized_weights, unquantized = 0, 0, []
        for layer, after in zip(_leaves(model), _leaves(quantized), strict=True):
            size = _matrix_weights(layer)
            total_weights += size
            if getattr(after, "quantization_mode", None) is not None:
                quantized_weights += size
            elif size:
                unquantized.append(f"{layer.name} ({type(layer).__name__})")
        if not quantized_weights:
            raise InvalidInput(
                f"Keras cannot quantize any layer of this model to {self.mode}; the model has "
                f"{', '.join(unquantized) or 'no kernels'}; give a model with layers of type "
                "Dense, EinsumDense or Embedding"
            )
        remark = f"; not quantized by Keras: {', '.join(unquantized)}" if unquantized else ""
        return CompressedModel(
            quantized,
            f"{quantized_weights / total_weights:.1%} of the kernel weights are quantized to "
            f"{self.mode}{remark}",
        )


def _leaves(model: keras.Model) -> list[keras.Layer]:
    """Return the layers that contain no other layers, in the order of Keras's own traversal."""
    # labkit uses Keras's private method `_flatten_layers`, because Keras's `quantize` visits the
    # layers in the order of this method. A different order of layers could pair a layer of the
    # original model with the wrong quantized layer.
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [layer for layer in layers if not layer._layers]


def _matrix_weights(layer: keras.Layer) -> int:
    """Return the number of weights in a layer's kernels and embedding tables, without biases."""
    return sum(int(weight.numpy().size) for weight in layer.weights if len(weight.shape) > 1)
