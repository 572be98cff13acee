"""Replicas that must be equal between steps: what callbacks do on one rank alone is for all."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Communicator
from labkit.keras.optimizer import distributed_optimizers
from labkit.keras.whole_batch import say_on_first

# Methods of callbacks that all ranks call alike, and when that is.
_POINTS = {
    "on_train_begin": "at the start of training",
    "on_epoch_begin": "at the start of epoch {}",
    "on_test_begin": "at the start of validation",
    "on_test_end": "after validation",
    "on_epoch_end": "after epoch {}",
    "on_train_end": "at the end of training",
}
_SEED = "seed_generator_state"  # random layers draw differently on each rank


class ReplicasDifferError(LabkitError):
    """Replicas that should be equal are not."""


class ReplicaState(NamedTuple):
    """What one rank has between two steps.

    Attributes:
        trainable: whether each weight is.
        sums: a checksum of each variable that replicas share.
        scalars: the values of those that are one number, and names of all, for messages.
        own_sums: of variables that may differ between ranks, such as moving statistics.
        first_epoch: at which `fit` begins.
    """

    trainable: tuple[bool, ...]
    sums: tuple[int, ...]
    scalars: tuple[tuple[str, float | None], ...]
    own_sums: tuple[int, ...]
    first_epoch: int

    @property
    def shared(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        return self.trainable, self.sums, self.first_epoch

    def difference(self, other: ReplicaState, ranks: tuple[int, int]) -> str:
        """Name what two ranks have differently."""
        if self.first_epoch != other.first_epoch:
            return (
                f"rank {ranks[0]} begins at epoch {self.first_epoch + 1}, rank {ranks[1]} at "
                f"epoch {other.first_epoch + 1}"
            )
        if self.trainable != other.trainable or len(self.sums) != len(other.sums):
            return f"ranks {ranks[0]} and {ranks[1]} train different variables"
        places = [n for n, value in enumerate(self.sums) if value != other.sums[n]]
        # A number, such as a rate, is rather the cause.
        place = next((n for n in places if self.scalars[n][1] is not None), places[0])
        (name, value), (_, another) = self.scalars[place], other.scalars[place]
        if value is None or another is None:
            return f"{name} is not the same on ranks {ranks[0]} and {ranks[1]}"
        return f"{name} is {value:g} on rank {ranks[0]} and {another:g} on rank {ranks[1]}"


class ReplicaConsistency:
    """Compares replicas behind all callbacks of a fit, by 8 bytes a rank.

    Where callbacks on one rank have changed weights, optimizer, first epoch or the end of training,
    all ranks take that: so one process does, whose only rank has all callbacks.

    Args:
        model: with distributed optimizers.
        communicator: the ranks.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._before = self._state()
        self._mentioned: set[str] = set()

    def follow(self, history: keras.callbacks.History) -> None:
        """Compare when the fit's own history is called: Keras calls it behind users' callbacks."""
        for name in _POINTS:
            # Of the class: a history may be used for several fits.
            inner = getattr(type(history), name).__get__(history)
            setattr(history, name, partial(self._compare_after, history, inner, name))

    def note(self) -> None:
        """Note the state before callbacks."""
        self._before = self._state()

    def compare_now(self, moment: str) -> None:
        """Compare where no other callbacks come between.

        Raises:
            ReplicasDifferError: replicas differ.
        """
        self.note()
        self._compare(moment)

    def _compare_after(
        self,
        history: keras.callbacks.History,
        inner: Callable[..., None],
        name: str,
        *given: Any,
        **named: Any,
    ) -> None:
        inner(*given, **named)
        epoch = given[0] if name.startswith("on_epoch") else 0
        self._compare(_POINTS[name].format(epoch + 1))
        if name == "on_train_end":
            for each in _POINTS:
                vars(history).pop(each, None)

    def _compare(self, moment: str) -> None:
        own, before, stops = self._state(), self._before, bool(self._model.stop_training)
        alike = own.shared, own.own_sums != before.own_sums, stops
        # 48 bits, which a float64 has exactly.
        number = hashlib.blake2b(repr(alike).encode(), digest_size=6).digest()
        what = f"the comparison of replicas {moment}"
        for optimizer in distributed_optimizers(self._model):
            optimizer.exchange.service.settle()  # one thread at a time
        numbers = self._communicator.everyone(float(int.from_bytes(number)), what)
        self._communicator.board.enter(f"work after {what}")  # else a rank seems to wait in it
        if np.all(numbers == numbers[0]):
            return
        found = self._communicator.allgather((before, own, stops), what)
        self._agree(moment, [row[0] for row in found], [row[1] for row in found])
        if any(row[2] for row in found) and not all(row[2] for row in found):
            who = ", ".join(str(rank) for rank, row in enumerate(found) if row[2])
            self._mention(f"a callback on rank {who} alone stops training {moment}: all ranks stop")
            self._model.stop_training = True

    def _agree(
        self, moment: str, before: Sequence[ReplicaState], after: Sequence[ReplicaState]
    ) -> None:
        """Give all ranks the state of those whose callbacks have changed it."""
        if text := _first_difference(before):
            raise ReplicasDifferError(
                f"replicas differ {moment}: {text}. A callback on one rank has changed it between "
                "steps, or stands before labkit's: give it to every rank, behind "
                "labkit.keras.callbacks(communicator)"
            )
        pairs = list(zip(before, after, strict=True))
        shared = [rank for rank, (old, new) in enumerate(pairs) if old.shared != new.shared]
        changed = shared or [rank for rank, (old, new) in enumerate(pairs) if old != new]
        if not changed or (len(changed) == len(pairs) and not _first_difference(after)):
            return
        if text := _first_difference(after, changed):
            raise ReplicasDifferError(
                f"callbacks leave different replicas {moment}: {text}. Give one rank the callback, "
                "or let it do the same on all"
            )
        root = changed[0]
        if after[root].trainable != before[root].trainable:
            raise ReplicasDifferError(
                f"a callback on rank {root} alone has changed which layers are trainable "
                f"{moment}: give it to every rank"
            )
        names = self._communicator.share(_changes(*pairs[root]), root, "what a callback changed")
        self._mention(f"a callback on rank {root} alone changes {names}: all ranks take it")
        # A callback that restores builds it before.
        if len({len(state.sums) for state in after}) > 1 and not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)
        every = [*self._model.variables, *self._optimizer_variables]
        broadcast([v for v in every if v.name != _SEED], self._communicator, root)
        self._model._initial_epoch = after[root].first_epoch or None

    def _mention(self, text: str) -> None:
        """Tell the user once in a fit."""
        if text not in self._mentioned:
            self._mentioned.add(text)
            say_on_first(self._communicator, text)

    @property
    def _optimizer_variables(self) -> list[keras.Variable]:
        """Those that replicas share: gradients that are added up are of each rank."""
        found: list[keras.Variable] = []
        for optimizer in distributed_optimizers(self._model):
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            added_up = {id(v) for v in getattr(inner, "_accumulated_gradients", ())}
            found += [v for v in optimizer.variables if id(v) not in added_up]
        return found

    def _state(self) -> ReplicaState:
        layers = self._model._flatten_layers()
        # Also of layers that are frozen, whose variables Keras does not name trainable.
        weights = [v for layer in layers for v in layer._trainable_variables]
        shared = [*weights, *self._optimizer_variables]
        known = {id(variable) for variable in shared}
        others = [v for v in self._model.variables if id(v) not in known and v.name != _SEED]
        return ReplicaState(
            tuple(bool(variable.trainable) for variable in weights),
            tuple(map(_checksum, shared)),
            tuple((v.path, None if len(v.shape) else float(v)) for v in shared),
            tuple(map(_checksum, others)),
            self._model._initial_epoch or 0,
        )


def broadcast(
    variables: Sequence[keras.Variable], communicator: Communicator, root: int = 0
) -> None:
    """Give every rank the values that the variables have on rank 0, or another.

    Random layers draw differently on each rank: the rank is added to their seeds.

    Raises:
        InvalidInput: ranks have other variables than rank 0.
    """
    own = [(str(variable.dtype), tuple(variable.shape)) for variable in variables]
    told = communicator.allgather(own, "the agreement on the variables")
    for rank, other in enumerate(told):
        if other != told[0]:
            pairs = zip(told[0], other, strict=False)
            first = next(((a, b) for a, b in pairs if a != b), (len(told[0]), len(other)))
            raise InvalidInput(
                f"rank 0 and rank {rank} have different variables: {first[0]} and {first[1]}; "
                "give every rank the same model, optimizer, keras floatx and dtype policy"
            )
    for number, variable in enumerate(variables):
        value = np.array(variable.numpy(), order="C")
        # By number: Keras counts the names of layers on, and ranks may have made more of them.
        communicator.broadcast(value, root, f"the broadcast of variable {number}")
        if variable.name == "seed_generator_state":
            value[0] += communicator.rank
        variable.assign(value)


def _first_difference(states: Sequence[ReplicaState], ranks: Sequence[int] | None = None) -> str:
    """What differs first between these ranks; "": nothing."""
    first, *others = range(len(states)) if ranks is None else ranks
    for rank in others:
        if states[rank].shared != states[first].shared:
            return states[first].difference(states[rank], (first, rank))
    return ""


def _changes(before: ReplicaState, after: ReplicaState) -> str:
    """Name what has changed on a rank."""
    places = [n for n, value in enumerate(after.sums) if before.sums[n : n + 1] != (value,)]
    if after.first_epoch != before.first_epoch:
        return f"the first epoch to {after.first_epoch + 1}"
    if not places:
        return "moving statistics"
    name, value = after.scalars[places[0]]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return (name if value is None else f"{name} to {value:g}") + more


def _checksum(variable: keras.Variable) -> int:
    """Return a checksum that also tells the order of elements."""
    return zlib.crc32(variable.numpy().tobytes())
