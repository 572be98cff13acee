"""Low-rank factors: a wide matrix as the product of two thin ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from labkit.common.errors import InvalidInput
from labkit.datasets import Dataset
from labkit.deployment.smaller_models import Compressed, FineTuned, copy_of, layers_of

if TYPE_CHECKING:
    import keras

Array = NDArray[np.floating]


class LowRank(FineTuned):
    r"""Replace each Dense layer by two, from the truncated SVD of its kernel, where that saves.

    \(W \approx (U_r \Sigma_r^{1/2})(\Sigma_r^{1/2} V_r^\top)\), the nearest matrix of that rank
    \(r\) in the Frobenius norm: \(r (m + n)\) parameters in the place of \(m n\). Layers with
    \(r (m + n) \ge m n\) stay, as do all other kinds of layers.

    Args:
        approximation_rank: r, columns of the first factor.
        epochs: of training both factors afterwards.

    Source: Denton, Zaremba, Bruna, LeCun, Fergus, "Exploiting linear structure within
    convolutional networks for efficient evaluation", 2014, arXiv 1404.0736; for dense layers Xue,
    Li, Gong, "Restructuring of deep neural network acoustic models with singular value
    decomposition", Interspeech 2013. Differs from them: one rank for all layers, and the singular
    values are shared out to both factors, so that training starts from factors of one scale.
    """

    family: ClassVar[str] = "low rank"
    approximation_rank: PositiveInt = 16

    @property
    def label(self) -> str:
        """`low rank 16 + 2 epochs`"""
        return f"low rank {self.approximation_rank}{self._trained}"

    def apply(self, model: keras.Model, data: Dataset) -> Compressed:
        """Return the factored copy; raises InvalidInput where no Dense layer would shrink."""
        shapes = {
            layer.name: tuple(layer.kernel.shape) for layer in layers_of(model) if _is_dense(layer)
        }
        chosen = [name for name, shape in shapes.items() if saves(shape, self.approximation_rank)]
        if not chosen:
            dense = ", ".join(
                f"{name} {m}x{n} (below {m * n / (m + n):.4g})" for name, (m, n) in shapes.items()
            )
            raise InvalidInput(
                f"approximation_rank={self.approximation_rank} makes no Dense layer smaller; it "
                f"would make: {dense or 'none, for this model has no Dense layer'}"
            )
        factored = factorise(model, self.approximation_rank)
        if self.epochs:
            factored = self.fine_tune(factored, data)
        what = f"{len(chosen)} of {len(shapes)} Dense layers in two factors"
        return Compressed(factored, what)


def factors(kernel: Array, approximation_rank: int) -> tuple[Array, Array]:
    """Two factors of a kernel (m, n): shapes (m, r) and (r, n), r at most min(m, n)."""
    # In float64, which the kernel's own precision is then rounded from.
    left, values, right = np.linalg.svd(np.asarray(kernel, np.float64), full_matrices=False)
    root = np.sqrt(values[:approximation_rank])
    first = left[:, :approximation_rank] * root  # (m, r)
    second = root[:, None] * right[:approximation_rank]  # (r, n)
    return first.astype(kernel.dtype), second.astype(kernel.dtype)


def saves(shape: tuple[int, ...], approximation_rank: int) -> bool:
    """Whether r (m + n) < m n."""
    m, n = shape
    return approximation_rank * (m + n) < m * n


def factorise(model: keras.Model, approximation_rank: int) -> keras.Model:
    """A copy of the model in which Dense layers that become smaller are two."""
    import keras

    def replaced(layer: keras.Layer) -> keras.Layer:
        if _is_dense(layer) and saves(layer.kernel.shape, approximation_rank):
            return _two(layer, approximation_rank)
        # A new layer: the copy shares none with the model.
        return type(layer).from_config(layer.get_config())

    plain = copy_of(model)
    factored: keras.Model = keras.models.clone_model(plain, clone_function=replaced, recursive=True)
    _fill(plain, factored, approximation_rank)
    return factored


def _two(layer: keras.Layer, approximation_rank: int) -> keras.Layer:
    import keras

    first = keras.layers.Dense(
        approximation_rank, use_bias=False, dtype=layer.dtype_policy, name=f"{layer.name}_in"
    )
    second = keras.layers.Dense.from_config(layer.get_config() | {"name": f"{layer.name}_out"})
    return keras.Sequential([first, second], name=layer.name)


def _fill(plain: keras.Model, factored: keras.Model, approximation_rank: int) -> None:
    """Give the new layers the old ones' values, or their factors."""
    for old, new in zip(plain.layers, factored.layers, strict=True):
        if hasattr(old, "layers"):
            _fill(old, new, approximation_rank)
        elif hasattr(new, "layers"):
            kernel, *bias = old.get_weights()
            new.set_weights([*factors(kernel, approximation_rank), *bias])
        else:
            new.set_weights(old.get_weights())


def _is_dense(layer: keras.Layer) -> bool:
    import keras

    # A kernel of two dimensions is what a Dense has, whatever the dimensions of its input.
    return type(layer) is keras.layers.Dense and layer.quantization_mode is None
