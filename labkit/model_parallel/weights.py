"""The weights of a whole model on ranks that train some of them each.

While ranks train, each lets go of what it does not train; before anyone looks at the whole model,
all bring it up to date.
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
from labkit.model_parallel.meter import LayerRow, Meter, uncounted

if TYPE_CHECKING:
    import numpy.typing as npt


Place: TypeAlias = tuple[slice | EllipsisType, ...]  # an index into a whole weight


class Pair(NamedTuple):
    """A weight of the whole model, what a rank has of it, and where that is in the whole one."""

    whole: keras.Variable
    own: keras.Variable
    place: Place

    def take(self) -> None:
        """Give the own weight its part of the whole one."""
        self.own.assign(self.whole.value[self.place])

    @property
    def corner(self) -> tuple[int, ...]:
        """Where in the whole weight the own one begins."""
        place, axes = list(self.place), len(self.whole.shape)
        at = place.index(...) if ... in place else len(place)
        place[at : at + 1] = [slice(None)] * (axes - len(place) + (at < len(place)))
        return tuple(each.start or 0 for each in place if isinstance(each, slice))


class Share:
    """Some of each layer of a model on a rank, with weights beside those of the whole one.

    The whole weights are the model's own: `release` frees them while ranks train, `collect` brings
    them back.

    Args:
        communicator: the ranks of one replica.

    Attributes:
        model: what computes it, with variables, trainable_variables and losses as Keras has them.
        first: whether this is the first rank of its replica, which knows loss and predictions.
    """

    model: keras.Model

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.first = communicator, communicator.rank == 0
        self._released = False

    def predict(self, x: Nest) -> tf.Tensor:
        """The outputs of the whole model for x, on the first rank at least (collective)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it predicts")

    def describe(self, steps: int = 1) -> list[LayerRow]:
        """A row a layer, of what crossed in so many steps."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it has")

    def pairs(self) -> Iterable[Pair]:
        """Each whole weight that is cut, beside what this rank has of it."""
        raise NotImplementedError(f"{type(self).__name__} does not say which weights it has")

    def meters(self) -> Iterable[Meter]:
        """What counts the bytes that cross between ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it sends")

    def uncounted(self) -> AbstractContextManager[None]:
        """What crosses between ranks in here is none of their training's."""
        return uncounted(self.meters())

    def release(self, look: bool = True) -> None:
        """Free the whole weights of what is cut, until `collect`; own ones first take what was set.

        Args:
            look: whether some may have been set since they were freed.
        """
        if self._released and not look:
            return
        # A callback may have set a weight of the whole model between two steps: then it has a value
        # again, which counts from here on.
        for pair in self.pairs():
            if is_there(pair.whole):
                pair.take()
                free(pair.whole)
        self._released = True

    def collect(self) -> None:
        """Bring the weights of the whole model up to date, on all ranks of the replica."""
        if self._released:
            self.release()  # what was set since then
        for whole, own, place in self.pairs():
            mine = own.numpy()
            value = np.empty(whole.shape, mine.dtype)
            for there, part in self.communicator.allgather((place, mine), "the whole weights"):
                value[there] = part
            put(whole, value)
        self._released = False


class Whole:
    """All weights at the begin and the end of training, and between them those of the rank alone.

    Args:
        model: the whole one, built.
        parts: models of its layers, by the rank that says what their weights are.
        own: which of these is the one of this rank's parts; it may be another rank.
        everyone: the ranks.
        shares: those parts of this rank of which it has some of each layer.
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
        self._others = [each for each in self._variables if self._owner(each, own) != own]

    def release(self, look: bool = True) -> None:
        """Free the weights that this rank does not train, until `collect`.

        Args:
            look: whether some may have been set since they were freed.
        """
        for share in self._shares:
            share.release(look)
        if self._released and not look:
            return
        for variable in self._others:
            if is_there(variable):
                free(variable)
        self._released = True

    def collect(self) -> None:
        """Give all ranks the weights of all (collective)."""
        for share in self._shares:
            share.collect()
        # In the order of the model's variables, which all ranks share: a broadcast is collective.
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
    """Let go of the value of a variable, until `put` or someone sets it again.

    Nothing may compute with it in between.
    """
    variable.value._validate_shape = False  # or TensorFlow would take no value of another shape
    put(variable, tf.zeros([0], variable.dtype))


def put(variable: keras.Variable, value: npt.ArrayLike | tf.Tensor) -> None:
    """Give a variable a value of any shape: what has read it before keeps reading it."""
    value = tf.convert_to_tensor(value, variable.dtype)
    # Not `assign`, which holds the value against the shape that the variable was made with.
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)


def is_there(variable: keras.Variable) -> bool:
    """Whether a variable has a value, also one that was set since it was freed."""
    return tuple(variable.value.value().shape) == tuple(variable.shape)
