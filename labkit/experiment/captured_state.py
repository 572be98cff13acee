"""Keras objects that a model's function takes from outside: what does not travel to ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from labkit.common.canonical_json import captured

if TYPE_CHECKING:
    from labkit.keras.optimizer_state import Saveable


def refuse_lost_state(function: Callable[..., Any]) -> None:
    """Refuse a function around Keras objects with state that their configuration loses.

    Keras pickles an optimizer, a loss or a metric as its configuration.

    Raises:
        ValueError: an object has more state than that.
    """
    if "keras" not in sys.modules:  # then there is none
        return
    from labkit.keras import beyond_configuration

    for name, value in _captured(function, []):
        for part in _saveable(value):
            kind = type(part).__name__
            try:
                lost = beyond_configuration(part)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"model takes {name!r} from outside, and Keras cannot make its {kind} again "
                    f"({error}): make it inside the function"
                ) from error
            if lost:
                raise ValueError(
                    f"model takes {name!r} from outside, and {kind}.{next(iter(lost))} would not "
                    "travel to the ranks: make it inside the function, which each rank calls"
                )


def _captured(function: Callable[..., Any], known: list[FunctionType]) -> Iterator[tuple[str, Any]]:
    """Names and values from outside of a function, and of those that it calls."""
    if not isinstance(function, FunctionType) or any(function is each for each in known):
        return
    known.append(function)
    for name, value in captured(function).items():
        yield name, value
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _captured(value, known)


def _saveable(value: object) -> Iterator[Saveable]:
    """The object, or what a model is compiled with."""
    import keras

    kinds = keras.optimizers.Optimizer, keras.Loss, keras.Metric
    if isinstance(value, keras.Model) and value.compiled:
        config = value._compile_config.config
        leaves = keras.tree.flatten([value.optimizer, config.get("loss"), config.get("metrics")])
        yield from (leaf for leaf in leaves if isinstance(leaf, kinds))
    elif isinstance(value, kinds):
        yield value
