"""Weights of a model that several ranks train together, where each rank trains some weights.

During training, each rank frees the memory of those weights that it does not train. All ranks
update the whole model's weights before other code reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.functional import Nest
from labkit.model_parallel.messages import LayerRow, Meter, uncounted

if TYPE_CHECKING:
    import numpy.typing as npt


# The type `Place` is an index expression that selects a part of a whole weight.
Place: TypeAlias = tuple[slice | EllipsisType, ...]


class WeightShard(NamedTuple):
    """A weight of the whole model, with this rank's part of the weight and the part's index."""

    whole: keras.Variable
    local: keras.Variable
    place: Place

    def copy_from_whole(self) -> None:
        """Copy this rank's slice of the whole weight to the rank's own variable."""
        self.local.assign(self.whole.value[self.place])

    @property
    def corner(self) -> tuple[int, ...]:
        """The index in the whole weight at which this rank's part starts."""
        place, axes = list(self.place), len(self.whole.shape)
        at = place.index(...) if ... in place else len(place)
        place[at : at + 1] = [slice(None)] * (axes - len(place) + (at < len(place)))
        return tuple(axis.start or 0 for axis in place if isinstance(axis, slice))


class Share:
    """A rank's part of each layer of a model, with separate variables for the weights.

    During training, `release` frees the weights of the whole model, and `collect` restores them
    afterwards.

    Args:
        communicator: Communicator of the ranks of one replica.

    Attributes:
        model: This rank's part of the model, a callable with the Keras attributes variables,
            trainable_variables and losses.
        first: Whether this is the first rank of its replica, which computes the loss and the
            predictions.
    """

    model: keras.Model

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.first = communicator, communicator.rank == 0
        self._released = False

    def predict(self, x: Nest) -> tf.Tensor:
        """Return the whole model's outputs for x, at least on the first rank (collective call)."""
        raise NotImplementedError(f"{type(self).__name__} does not define predict()")

    def describe(self, steps: int = 1) -> list[LayerRow]:
        """Return one row per layer, with mean message bytes per step (total divided by `steps`)."""
        raise NotImplementedError(f"{type(self).__name__} does not define describe()")

    def pairs(self) -> Iterable[WeightShard]:
        """Return each weight of the divided layers, with this rank's part of the weight."""
        raise NotImplementedError(f"{type(self).__name__} does not define pairs()")

    def meters(self) -> Iterable[Meter]:
        """Return the byte counters of the messages between the ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not define meters()")

    def uncounted(self) -> AbstractContextManager[None]:
        """Return a context manager during which this model's messages are not counted."""
        return uncounted(self.meters())

    def release(self, look: bool = True) -> None:
        """Copy newly set weights to the slices, then free the whole weights of the divided layers.

        Args:
            look: Whether to search for whole weights that were set after they were freed.
        """
        if self._released and not look:
            return
        # Between two training steps, a callback may set a freed weight of the whole model. Training
        # must continue with the weight value that a callback has set.
        for pair in self.pairs():
            if has_value(pair.whole):
                pair.copy_from_whole()
                free(pair.whole)
        self._released = True

    def collect(self) -> None:
        """Update the whole model's weights on all ranks of the replica (collective call)."""
        if self._released:
            # The method `release` also copies whole weights that were set after they had been
            # freed.
            self.release()
        for whole, local, place in self.pairs():
            values = local.numpy()
            value = np.empty(whole.shape, values.dtype)
            for position, part in self.communicator.allgather((place, values), "the whole weights"):
                value[position] = part
            put(whole, value)
        self._released = False


class WholeWeights:
    """A manager of a model's weights, with which each rank stores only the weights it trains.

    Args:
        model: The whole model, built.
        parts: Dict from rank to the models with the layers whose weights the rank owns.
        own: Rank that owns the weights that this rank trains. With replicas or slices, another rank
            may own the weights.
        everyone: Communicator of all ranks of the training.
        shares: This rank's `Share` objects, each of which has a part of every layer of a model.
    """

    def __init__(
        self,
        model: keras.Model,
        parts: Mapping[int, Sequence[keras.Model]],
        own: int,
        everyone: Communicator,
        shares: Sequence[Share] = (),
    ) -> None:
        self._everyone, self._variables, self._released = everyone, list(model.variables), False
        self._shares = shares
        self._owners = {
            id(variable): rank
            for rank, models in parts.items()
            for part in models
            for variable in part.variables
        }
        self._others = [v for v in self._variables if self._owner(v, own) != own]

    def release(self, look: bool = True) -> None:
        """Free the weights that this rank does not train; `collect` restores them.

        Args:
            look: Whether to search for weights that were set after they were freed.
        """
        for share in self._shares:
            share.release(look)
        if self._released and not look:
            return
        for variable in self._others:
            if has_value(variable):
                free(variable)
        self._released = True

    def collect(self) -> None:
        """Distribute all weights to all ranks (collective call)."""
        for share in self._shares:
            share.collect()
        # Broadcasts are collective calls, so all ranks make them in the order of the model's
        # variables.
        for variable in self._variables:
            owner = self._owner(variable, 0)
            value = np.empty(variable.shape, tf.as_dtype(variable.dtype).as_numpy_dtype)
            if owner == self._everyone.rank:
                value[...] = variable.numpy()
            self._everyone.broadcast(value, owner, "the weights of the stages")
            put(variable, value)
        self._released = False

    def _owner(self, variable: keras.Variable, otherwise: int) -> int:
        return self._owners.get(id(variable), otherwise)


def free(variable: keras.Variable) -> None:
    """Free the memory of a variable's value until the variable is set again, for example by `put`.

    After `free`, no computation may use the variable until it is set again.
    """
    # With `_validate_shape` set to False, TensorFlow accepts values of other shapes for the
    # variable.
    variable.value._validate_shape = False
    put(variable, tf.zeros([0], variable.dtype))


def put(variable: keras.Variable, value: npt.ArrayLike | tf.Tensor) -> None:
    """Set a variable to a value of any shape; references to the variable remain valid."""
    value = tf.convert_to_tensor(value, variable.dtype)
    # The method `assign` would reject a value whose shape differs from the variable's original
    # shape.
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)


def has_value(variable: keras.Variable) -> bool:
    """Return whether a variable has a value, because it was never freed or was set again later."""
    return tuple(variable.value.value().shape) == tuple(variable.shape)
