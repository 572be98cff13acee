"""Data as an experiment takes them: a name, arrays, or a callable; checked before a rank starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit import datasets
from labkit.common.errors import InvalidInput


def parse_data(value: Any) -> Any:
    """A name, a callable, or (x, y) as NumPy arrays or nests of them.

    Raises:
        ValueError: it is none of these, or holds values that cannot train a model.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or value is None:
        return value
    if callable(value):
        _check_callable(value)
        return value
    if not isinstance(value, tuple | list):
        kind = type(value).__name__
        advice = "; give a function that returns it" if hasattr(value, "element_spec") else ""
        raise ValueError(f"data are a name, a callable or arrays (x, y), not a {kind}{advice}")
    if len(value) != 2:
        raise ValueError(f"arrays are given as (x, y), not as {len(value)} parts")
    x, y = (_parse_arrays(what, part) for what, part in zip("xy", value, strict=True))
    rows = {len(leaf) for leaf in leaves((x, y))}
    if len(rows) != 1 or rows == {0}:
        raise ValueError(f"x and y must have the same number of rows, above 0; got {rows}")
    return x, y


def check_validation(data: tuple[Any, ...], validation: Any) -> None:
    """Refuse validation arrays that a model for the training arrays cannot take."""
    if not isinstance(validation, tuple):
        return
    one, other = ([leaf.shape[1:] for leaf in leaves(arrays)] for arrays in (data, validation))
    if one != other:
        raise InvalidInput(
            f"validation has samples of shapes {other}, and the training data {one}: give as many "
            "arrays, of the same shapes"
        )


def labels_of(validation: Any) -> Any:
    """The labels of validation arrays; None of a callable, which are not known yet."""
    return validation[1] if isinstance(validation, tuple) else None


def leaves(value: Any) -> list[Any]:
    """Arrays in a nest of tuples, lists and dictionaries."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def _parse_arrays(what: str, value: Any) -> Any:
    """The same nest with NumPy arrays of finite numbers; texts are for a layer to look up."""
    if isinstance(value, dict):
        return {key: _parse_arrays(f"{what}[{key!r}]", part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_parse_arrays(what, part) for part in value)
    if not getattr(value, "shape", ()):
        raise ValueError(
            f"x and y are arrays, or nests of arrays, with a row a sample; "
            f"got {type(value).__name__}: use numpy.asarray"
        )
    array = datasets.to_array(what, value)
    datasets.check_values(what, array, texts=what.startswith("x"))
    return array


def _check_callable(function: Callable[..., Any]) -> None:
    """Refuse what cannot return a dataset, as far as its definition tells."""
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isgeneratorfunction(function):
        raise ValueError(
            f"{name} is a generator; give a function that returns a tf.data.Dataset, such as "
            "tf.data.Dataset.from_generator(…)"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{name} is called without arguments: {error}") from error
    except ValueError:  # a function of C has no signature
        return
