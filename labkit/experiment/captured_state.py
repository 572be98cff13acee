"""Check of Keras objects that a model function captures and that are pickled for the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from labkit.common.canonical_json import captured

if TYPE_CHECKING:
    from labkit.keras.optimizer import Saveable


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
    """Yield names and values that a function captures, also through functions that it captures.

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
    """Yield the optimizers, losses and metrics of a compiled model, or a single such object."""
    import keras

    kinds = keras.optimizers.Optimizer, keras.Loss, keras.Metric
    if isinstance(value, keras.Model) and value.compiled:
        config = value._compile_config.config
        leaves = keras.tree.flatten([value.optimizer, config.get("loss"), config.get("metrics")])
        yield from (leaf for leaf in leaves if isinstance(leaf, kinds))
    elif isinstance(value, kinds):
        yield value
