"""The weights of a whole model on ranks that train some of them each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.freed import free, is_there, put
from labkit.model_parallel.tensor import Sliced


class Whole:
    """All weights at the begin and the end of training, and between them those of the rank alone.

    Args:
        model: the whole one, built.
        parts: models of its layers, by the rank that says what their weights are.
        own: which of these is the one of this rank's parts; it may be another rank.
        everyone: the ranks.
        sliced: those parts of this rank of which it has a slice.
    """

    def __init__(
        self,
        model: Any,
        parts: Mapping[int, Sequence[Any]],
        own: int,
        everyone: Communicator,
        sliced: Sequence[Sliced] = (),
    ) -> None:
        self._everyone, self._variables, self._released = everyone, list(model.variables), False
        self._sliced = sliced
        self._owners = {
            id(variable): rank
            for rank, models in parts.items()
            for part in models
            for variable in part.variables
        }
        self._others = [each for each in self._variables if self._owner(each, own) != own]

    def release(self, look: bool = True) -> None:
        """Free the weights that this rank does not train, until `collect`.

        Args:
            look: whether some may have been set since they were freed.
        """
        for part in self._sliced:
            part.release(look)
        if self._released and not look:
            return
        for variable in self._others:
            if is_there(variable):
                free(variable)
        self._released = True

    def collect(self) -> None:
        """Give all ranks the weights of all (collective)."""
        for part in self._sliced:
            part.collect()
        for variable in self._variables:
            owner = self._owner(variable, 0)
            value = np.empty(variable.shape, tf.as_dtype(variable.dtype).as_numpy_dtype)
            if owner == self._everyone.rank:
                value[...] = variable.numpy()
            self._everyone.broadcast(value, owner, "the weights of the stages")
            put(variable, value)
        self._released = False

    def _owner(self, variable: Any, otherwise: int) -> int:
        return self._owners.get(id(variable), otherwise)
