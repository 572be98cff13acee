"""The weights of a whole model on ranks that train some of them each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator


class Whole:
    """All weights at the begin and the end of training, and between them those of the rank alone.

    Args:
        model: the whole one, built.
        parts: models of its layers, by the rank of a replica that trains them.
        replica: the ranks of one replica.
        everyone: those of all replicas, one replica behind the other.
    """

    def __init__(
        self,
        model: Any,
        parts: Mapping[int, Sequence[Any]],
        replica: Communicator,
        everyone: Communicator,
    ) -> None:
        self._everyone, self._variables, self._released = everyone, list(model.variables), False
        self._owners = {
            id(variable): rank
            for rank, models in parts.items()
            for part in models
            for variable in part.variables
        }
        others = [v for v in self._variables if self._owner(v, replica.rank) != replica.rank]
        self._others = others

    def release(self) -> None:
        """Free the weights that other ranks train, until `collect`."""
        if not self._released:
            for variable in self._others:
                _put(variable, tf.zeros([0], variable.dtype))
            self._released = True

    def collect(self) -> None:
        """Give all ranks the weights of all (collective)."""
        for variable in self._variables:
            owner = self._owner(variable, 0)
            value = np.empty(variable.shape, tf.as_dtype(variable.dtype).as_numpy_dtype)
            if owner == self._everyone.rank:
                value[...] = variable.numpy()
            self._everyone.broadcast(value, owner, "the weights of the stages")
            _put(variable, tf.constant(value))
        self._released = False

    def _owner(self, variable: Any, otherwise: int) -> int:
        return self._owners.get(id(variable), otherwise)


def _put(variable: Any, value: Any) -> None:
    """Give a variable a value of any shape: what has read it before keeps reading it."""
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)
