"""Low-rank factorization: a weight matrix becomes the product of two thin matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from labkit.common.errors import InvalidInput
from labkit.datasets import Dataset
from labkit.deployment.smaller_models import CompressedModel, FineTuned, layers_of, uncompiled_copy

if TYPE_CHECKING:
    import keras

Array = NDArray[np.floating]


class LowRank(FineTuned):
    r"""Replace each Dense layer by two smaller layers, from the truncated SVD of its kernel.

    The kernel \(W\) is approximated by \((U_r \Sigma_r^{1/2})(\Sigma_r^{1/2} V_r^\top)\), the
    product of two factors. In the Frobenius norm, the product is the nearest matrix of rank \(r\).
    The two factors of rank \(r\) together have \(r (m + n)\) parameters. The m × n kernel has \(m
    n\) parameters. A Dense layer is not changed if its factors are not smaller: \(r (m + n) \ge m
    n\). Layers of all other types are not changed.

    Args:
        approximation_rank: Rank \(r\), the number of columns of the first factor; default: 16.
        epochs: Number of epochs in which both factors are trained after the factorization;
            default: 0.

    Source: Denton, Zaremba, Bruna, LeCun, Fergus, "Exploiting linear structure within convolutional
    networks for efficient evaluation", 2014, arXiv 1404.0736. For dense layers: Xue, Li, Gong,
    "Restructuring of deep neural network acoustic models with singular value decomposition",
    Interspeech 2013. Difference from the papers: all layers have the same rank, and the singular
    values are split equally between both factors, so that training starts from factors of equal
    scale.
    """

    family: ClassVar[str] = "low rank"
    approximation_rank: PositiveInt = 16

    @property
    def label(self) -> str:
        """Label of the method, such as `low rank 16 + 2 epochs`."""
        return f"low rank {self.approximation_rank}{self._trained}"

    def apply(self, model: keras.Model, data: Dataset) -> CompressedModel:
        """Return a copy of the model with two smaller layers in place of each large Dense layer.

        Raises:
            InvalidInput: No Dense layer of the model would become smaller.
        """
        shapes = {
            layer.name: tuple(layer.kernel.shape) for layer in layers_of(model) if _is_dense(layer)
        }
        chosen = [
            name
            for name, shape in shapes.items()
            if reduces_parameters(shape, self.approximation_rank)
        ]
        if not chosen:
            dense = ", ".join(
                f"{name} {m}x{n} (below {m * n / (m + n):.4g})" for name, (m, n) in shapes.items()
            )
            raise InvalidInput(
                f"approximation_rank={self.approximation_rank} makes no Dense layer smaller; "
                "give a rank below one of these limits: "
                f"{dense or 'none, because this model has no Dense layer'}"
            )
        factored = factorise(model, self.approximation_rank)
        if self.epochs:
            factored = self.fine_tune(factored, data)
        what = f"{len(chosen)} of {len(shapes)} Dense layers are replaced by two factors each"
        return CompressedModel(factored, what)


def factors(kernel: Array, approximation_rank: int) -> tuple[Array, Array]:
    """Return two factors of a kernel (m, n), with shapes (m, r) and (r, n)."""
    # The SVD is computed in float64; then its factors are rounded to the kernel's precision.
    left, values, right = np.linalg.svd(np.asarray(kernel, np.float64), full_matrices=False)
    root = np.sqrt(values[:approximation_rank])
    first = left[:, :approximation_rank] * root  # (m, r)
    second = root[:, None] * right[:approximation_rank]  # (r, n)
    return first.astype(kernel.dtype), second.astype(kernel.dtype)


def reduces_parameters(shape: tuple[int, ...], approximation_rank: int) -> bool:
    """Return whether two factors of rank r have fewer parameters: r (m + n) < m n."""
    m, n = shape
    return approximation_rank * (m + n) < m * n


def factorise(model: keras.Model, approximation_rank: int) -> keras.Model:
    """Return a copy of the model; replace each Dense layer by two layers if they are smaller."""
    import keras

    def replaced(layer: keras.Layer) -> keras.Layer:
        if _is_dense(layer) and reduces_parameters(layer.kernel.shape, approximation_rank):
            return _factor_layers(layer, approximation_rank)
        # A new layer is created, so that the copy shares no layer with the original model.
        return type(layer).from_config(layer.get_config())

    plain = uncompiled_copy(model)
    factored: keras.Model = keras.models.clone_model(plain, clone_function=replaced, recursive=True)
    _set_weights(plain, factored, approximation_rank)
    return factored


def _factor_layers(layer: keras.Layer, approximation_rank: int) -> keras.Layer:
    import keras

    first = keras.layers.Dense(
        approximation_rank, use_bias=False, dtype=layer.dtype_policy, name=f"{layer.name}_in"
    )
    second = keras.layers.Dense.from_config(layer.get_config() | {"name": f"{layer.name}_out"})
    return keras.Sequential([first, second], name=layer.name)


def _set_weights(plain: keras.Model, factored: keras.Model, approximation_rank: int) -> None:
    """Copy the original weights into the factored model; factorise the replaced kernels."""
    for old, new in zip(plain.layers, factored.layers, strict=True):
        if hasattr(old, "layers"):
            _set_weights(old, new, approximation_rank)
        elif hasattr(new, "layers"):
            kernel, *bias = old.get_weights()
            new.set_weights([*factors(kernel, approximation_rank), *bias])
        else:
            new.set_weights(old.get_weights())


def _is_dense(layer: keras.Layer) -> bool:
    import keras

    # The kernel of a Dense layer always has two dimensions, for any shape of its input.
    return type(layer) is keras.layers.Dense and layer.quantization_mode is None
