"""Validation of data sets (a name, arrays or a callable) before a rank starts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from labkit import datasets
from labkit.common.canonical_json import captured
from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    from labkit.keras.optimizer import Saveable


def parse_data(value: Any) -> Any:
    """Return a data set: a name, a callable, or a pair (x, y) of (nested) NumPy arrays.

    Args:
        value: A name, a path, None, a callable, or a pair (x, y) of array-like objects.

    Raises:
        ValueError: The value has another type, or contains values that cannot train a model.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) or value is None:
        return value
    if callable(value):
        _validate_callable(value)
        return value
    if not isinstance(value, tuple | list):
        kind = type(value).__name__
        advice = (
            "; give a function that returns the data set" if hasattr(value, "element_spec") else ""
        )
        raise ValueError(
            f"data must be a name, a callable or arrays (x, y), but it is a {kind}{advice}"
        )
    if len(value) != 2:
        raise ValueError(
            f"arrays must be given as a pair (x, y), but {len(value)} values were given"
        )
    x, y = (_parse_arrays(label, part) for label, part in zip("xy", value, strict=True))
    rows = {len(leaf) for leaf in leaves((x, y))}
    if len(rows) != 1 or rows == {0}:
        raise ValueError(
            f"x and y must have the same number of rows, at least 1, but they have {rows}"
        )
    return x, y


def check_validation(data: tuple[Any, ...], validation: Any) -> None:
    """Raise an error if validation and training arrays have different sample shapes.

    Args:
        data: Training arrays (x, y).
        validation: Validation arrays (x, y); a callable or None is not checked.

    Raises:
        InvalidInput: The number of arrays or the shape of a sample differs between training and
            validation.
    """
    if not isinstance(validation, tuple):
        return
    expected, actual = (
        [leaf.shape[1:] for leaf in leaves(arrays)] for arrays in (data, validation)
    )
    if expected != actual:
        raise InvalidInput(
            f"the validation data have samples of shapes {actual}, but the training data have "
            f"{expected}: give the same number of arrays, with the same shapes"
        )


def labels_of(validation: Any) -> Any:
    """Return the labels of validation arrays, or None for a callable, whose labels are unknown."""
    return validation[1] if isinstance(validation, tuple) else None


def leaves(value: Any) -> list[Any]:
    """Return the arrays of a nested structure in order; dictionaries are sorted by key."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in leaves(value[key])]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def _parse_arrays(label: str, value: Any) -> Any:
    """Return a copy of a nested structure, in which all arrays are validated NumPy arrays.

    Args:
        label: Name of the structure in error messages, such as `x['image']`.
        value: An array, or nested tuples, lists and dictionaries of arrays.

    Raises:
        ValueError: A leaf is no array, or has values that are not finite numbers. Only the features
            x may contain texts, because a layer of the model can look up texts.
    """
    if isinstance(value, dict):
        return {key: _parse_arrays(f"{label}[{key!r}]", part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_parse_arrays(label, part) for part in value)
    if not getattr(value, "shape", ()):
        raise ValueError(
            "x and y must be arrays, or nested structures of arrays, with one row per sample, "
            f"but a {type(value).__name__} was given: use numpy.asarray"
        )
    array = datasets.to_array(label, value)
    datasets.validate_values(label, array, texts=label.startswith("x"))
    return array


def _validate_callable(function: Callable[..., Any]) -> None:
    """Raise an error if a callable is a generator function or requires arguments.

    Raises:
        ValueError: The definition of the callable shows that a call without arguments cannot return
            a data set.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isgeneratorfunction(function):
        raise ValueError(
            f"{name} is a generator function; give a function that returns a tf.data.Dataset, "
            "such as tf.data.Dataset.from_generator(…)"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"labkit calls {name} without arguments, but {name} requires arguments: {error}"
        ) from error
    except ValueError:  # Python finds no signature for some functions that are written in C.
        return


def refuse_lost_state(function: Callable[..., Any]) -> None:
    """Raise an error if a function captures Keras objects that pickling would change.

    Keras pickles only the configuration of an optimizer, a loss or a metric, without any other
    state.

    Raises:
        ValueError: A captured object has state that is not in its configuration, or Keras cannot
            restore it.
    """
    if "keras" not in sys.modules:  # No Keras object can exist before Keras is imported.
        return
    from labkit.keras import beyond_configuration

    for name, value in _captured_values(function, []):
        for saveable in _saveables(value):
            kind = type(saveable).__name__
            try:
                lost_attributes = beyond_configuration(saveable)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"the model function captures {name!r}, but Keras cannot restore its {kind} "
                    f"from its configuration ({error}): create {name!r} inside the function"
                ) from error
            if lost_attributes:
                raise ValueError(
                    f"the model function captures {name!r}, but pickling for the ranks would lose "
                    f"{kind}.{next(iter(lost_attributes))}: create the {kind} inside the function, "
                    "which each rank calls"
                )


def _captured_values(
    function: Callable[..., Any], visited: list[FunctionType]
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a function captures, directly or via captured functions.

    Captured functions from other modules are not searched.

    Args:
        function: The function whose captured values are searched.
        visited: Functions that were already searched; `_captured_values` appends to the list.
    """
    if not isinstance(function, FunctionType) or any(function is other for other in visited):
        return
    visited.append(function)
    for name, value in captured(function).items():
        yield name, value
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _captured_values(value, visited)


def _saveables(value: object) -> Iterator[Saveable]:
    """Yield the optimizers, losses and metrics of a compiled model, or the value if it is one."""
    import keras

    kinds = keras.optimizers.Optimizer, keras.Loss, keras.Metric
    if isinstance(value, keras.Model) and value.compiled:
        config = value._compile_config.config
        leaves = keras.tree.flatten([value.optimizer, config.get("loss"), config.get("metrics")])
        yield from (leaf for leaf in leaves if isinstance(leaf, kinds))
    elif isinstance(value, kinds):
        yield value
