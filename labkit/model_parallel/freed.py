"""Keras variables whose values a rank lets go of while others train them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def free(variable: Any) -> None:
    """Let go of the value of a Keras variable, until `put` or someone sets it again.

    Nothing may compute with it in between.
    """
    variable.value._validate_shape = False  # or TensorFlow would take no value of another shape
    put(variable, tf.zeros([0], variable.dtype))


def put(variable: Any, value: Any) -> None:
    """Give a Keras variable a value of any shape: what has read it before keeps reading it."""
    value = tf.convert_to_tensor(value, variable.dtype)
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)


def is_there(variable: Any) -> bool:
    """Whether a Keras variable has a value, also one that was set since it was freed."""
    return tuple(variable.value.value().shape) == tuple(variable.shape)
