"""Weights in 8 or 4 bits: Keras's own quantization after training."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, ClassVar, Literal

from labkit.common.errors import InvalidInput
from labkit.datasets import Dataset
from labkit.deployment.smaller_models import Compressed, Method, copy_of

if TYPE_CHECKING:
    import keras


class Quantize(Method):
    r"""Round kernels to whole numbers of 8 or 4 bits, with a scale for every output unit.

    \(W_{ij} \approx s_j\, q_{ij}\) with \(q_{ij} \in [-127, 127]\) (int8, whose inputs are rounded
    as well, at every call) or \([-8, 7]\) (int4: weights only, two in a byte, a scale and a zero
    point for every 128 inputs). Keras quantizes Dense, EinsumDense and Embedding layers; the
    others, convolutions and recurrent cells among them, stay as they are, which `what` says.
    Biases stay as they are.

    Args:
        mode: "int8" or "int4".

    Source: B. Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, 2018, arXiv 1712.05877; here by `keras.Model.quantize`, with
    its default configurations. Differs from it: a scale for every output unit; inputs are scaled
    by their own greatest size, at every call; no training along.
    """

    family: ClassVar[str] = "quantize"
    mode: Literal["int8", "int4"] = "int8"

    @property
    def label(self) -> str:
        """`int8`"""
        return self.mode

    def apply(self, model: keras.Model, data: Dataset) -> Compressed:
        """Return the quantized copy; raises InvalidInput where Keras can quantize none of it."""
        quantized = copy_of(model)
        try:
            with warnings.catch_warnings():
                # One a layer that it leaves out; `what` says the same in a line.
                warnings.simplefilter("ignore")
                quantized.quantize(self.mode)
        except ValueError as error:
            raise InvalidInput(f"Keras cannot quantize this to {self.mode}: {error}") from None
        sizes, done, rest = 0, 0, []
        for layer, after in zip(_leaves(model), _leaves(quantized), strict=True):
            size = _matrix_weights(layer)
            sizes += size
            if getattr(after, "quantization_mode", None) is not None:
                done += size
            elif size:
                rest.append(f"{layer.name} ({type(layer).__name__})")
        if not done:
            raise InvalidInput(
                f"Keras quantizes none of this model's layers to {self.mode}: it has "
                f"{', '.join(rest) or 'no kernels'}; allowed: Dense, EinsumDense, Embedding"
            )
        left = f"; not quantized by Keras: {', '.join(rest)}" if rest else ""
        return Compressed(
            quantized, f"{done / sizes:.1%} of the kernel weights in {self.mode}{left}"
        )


def _leaves(model: keras.Model) -> list[keras.Layer]:
    """The layers that hold the weights, in order: those that Keras's own walk reaches."""
    # Private, but what `quantize` itself walks: any other order could match layers wrongly.
    found = model._flatten_layers(include_self=False, recursive=True)
    return [layer for layer in found if not layer._layers]


def _matrix_weights(layer: keras.Layer) -> int:
    """Weights of a layer in matrices and tables: all but biases and the like."""
    return sum(int(weight.numpy().size) for weight in layer.weights if len(weight.shape) > 1)
