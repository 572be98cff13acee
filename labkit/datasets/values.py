"""Check arrays before training: numbers that a model can learn from, labels that pose a task."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.datasets.dataset import Array, Shapes

FEW_CLASSES, MOST_CLASSES = 20, 1000


def to_array(what: str, value: Any) -> Array:
    """An array of pandas, TensorFlow or NumPy as a plain NumPy array.

    Raises:
        InvalidInput: it has masked values, or is none of these.
    """
    if isinstance(value, np.ma.MaskedArray):
        if hidden := int(np.ma.getmaskarray(value).sum()):
            raise InvalidInput(f"{what} has {hidden} masked values: fill them, or drop their rows")
        return np.asarray(value.data)
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.shape != tuple(value.shape):  # a sparse matrix becomes one object
        raise InvalidInput(f"{what} is a {type(value).__name__}: give a NumPy array")
    return array


def check_values(what: str, array: Array, texts: bool = False) -> None:
    """Refuse values that no loss or layer can compute with.

    Args:
        what: name of the array in the error.
        array: features or labels.
        texts: whether texts are allowed, which a layer of the model may look up.

    Raises:
        InvalidInput: some are no numbers, or infinite.
    """
    kind = array.dtype.kind
    if kind in "US" or (kind == "O" and all(isinstance(v, str | bytes) for v in array.flat)):
        if texts:
            return
        raise InvalidInput(
            f"{what} has texts: give whole numbers, numpy.unique({what}, return_inverse=True)[1]"
        )
    if kind in "mM":
        raise InvalidInput(f"{what} has dates: give numbers, such as seconds or days since a date")
    if kind not in "biuf" and array.dtype.name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        raise InvalidInput(
            f"{what} has the type {array.dtype}: give an array of numbers with rows of one length"
        )
    # The extremes cost no second array; only where they are not finite does the count matter.
    if kind == "f" and array.size and not np.isfinite([array.min(), array.max()]).all():
        count = int((~np.isfinite(array)).sum())
        raise InvalidInput(
            f"{what} has {count} values that are infinite or not a number: fill them in, or drop "
            "their rows"
        )


def shapes_of(data: tuple[Any, Any], y_validation: Any = None) -> Shapes | None:
    """The task that arrays (x, y) pose; None for nests of them."""
    x, y = data
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return None
    if y.dtype.kind in "biu" and y.ndim == 1:
        labels = [part for part in (y, y_validation) if isinstance(part, np.ndarray)]
        most = max(int(part.max()) for part in labels)
        return Shapes(tuple(x.shape[1:]), most + 1, "classification")
    return Shapes(tuple(x.shape[1:]), int(np.prod(y.shape[1:])), "regression")


def check_task(data: tuple[Any, Any], y_validation: Any = None, loss: str | None = None) -> None:
    """Refuse arrays from which the task of a named model would be a guess.

    Args:
        data: x and y.
        y_validation: labels of validation arrays.
        loss: of the model, if one is named: it says whether decimals are amounts.

    Raises:
        InvalidInput: features are texts; labels may mean classes or amounts, or count from below 0.
    """
    x, y = data
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return
    check_values("x", x)
    if y.dtype.kind == "f":
        if loss is None:
            _check_amounts(y)
    elif y.ndim > 1:
        raise InvalidInput(
            f"y has whole numbers of shape {y.shape}: give one class a row, such as y.ravel() or "
            "y.argmax(axis=1), or y.astype(float) for a regression"
        )
    else:
        labels = [part for part in (y, y_validation) if isinstance(part, np.ndarray)]
        least, most = (int(one) for one in (min(map(np.min, labels)), max(map(np.max, labels))))
        if least < 0 or most >= max(MOST_CLASSES, len(y)):
            raise InvalidInput(
                f"y has labels from {least} to {most}, and classes count from 0: give "
                "numpy.unique(y, return_inverse=True)[1], or y.astype(float) for a regression"
            )


def are_whole(y: Array) -> bool:
    """Whether labels may be classes that were written as decimals: few whole numbers."""
    distinct = np.unique(y)
    return len(distinct) <= min(FEW_CLASSES, len(y) // 2) and bool((distinct % 1 == 0).all())


def _check_amounts(y: Array) -> None:
    if y.ndim == 1 and are_whole(y):
        raise InvalidInput(
            "y has few whole numbers as decimals, which may be classes or amounts: give "
            "y.astype(int) for classes, or y.reshape(-1, 1) for a regression"
        )
    if y.ndim == 2 and y.shape[1] > 1 and (y.max(axis=1) == 1).all() and (y.sum(axis=1) == 1).all():
        raise InvalidInput("y is one-hot: give one class a row, y.argmax(axis=1)")
