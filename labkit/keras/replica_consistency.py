"""Consistency of replicas: all ranks adopt a change that a callback makes on one rank."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput, LabkitError
from labkit.communicator import Communicator
from labkit.keras.lars import LARS
from labkit.keras.optimizer import distributed_optimizers
from labkit.keras.whole_batch import print_on_first_rank

# The keys of _POINTS are callback methods that all ranks call in the same order. The values of
# _POINTS are phrases for messages, which say when Keras calls the callback method.
_POINTS = {
    "on_train_begin": "at the start of training",
    "on_epoch_begin": "at the start of epoch {}",
    "on_test_begin": "at the start of validation",
    "on_test_end": "after validation",
    "on_epoch_end": "after epoch {}",
    "on_train_end": "at the end of training",
}
# Variables named `seed_generator_state` are excluded from comparisons, because each rank draws
# different random numbers.
_SEED = "seed_generator_state"


class ReplicasDifferError(LabkitError):
    """The error for replicas that differ although they must be equal."""


class ReplicaState(NamedTuple):
    """The state of one rank's replica between two steps.

    Attributes:
        trainable: Whether each weight is trainable.
        sums: Checksum of each variable that must be equal on all ranks.
        scalars: Name and value of each variable that must be equal on all ranks. Variables that are
            not scalars have the value None.
        own_sums: Checksums of variables that may differ between ranks, such as moving statistics.
        first_epoch: Number of the epoch at which `fit` begins, from 0.
    """

    trainable: tuple[bool, ...]
    sums: tuple[int, ...]
    scalars: tuple[tuple[str, float | None], ...]
    own_sums: tuple[int, ...]
    first_epoch: int

    @property
    def shared(self) -> tuple[object, ...]:
        """The fields of a replica's state that must be equal on all ranks."""
        return self.trainable, self.sums, self.first_epoch

    def difference(self, other: ReplicaState, ranks: tuple[int, int]) -> str:
        """Describe the first difference between the states of two ranks."""
        if self.first_epoch != other.first_epoch:
            return (
                f"rank {ranks[0]} begins at epoch {self.first_epoch + 1}, rank {ranks[1]} at "
                f"epoch {other.first_epoch + 1}"
            )
        if self.trainable != other.trainable or len(self.sums) != len(other.sums):
            return f"ranks {ranks[0]} and {ranks[1]} train different variables"
        places = [n for n, value in enumerate(self.sums) if value != other.sums[n]]
        # If a scalar such as the learning rate differs, errors name the scalar first.
        place = next((n for n in places if self.scalars[n][1] is not None), places[0])
        (name, value), (_, another) = self.scalars[place], other.scalars[place]
        if value is None or another is None:
            return f"{name} is not the same on ranks {ranks[0]} and {ranks[1]}"
        return f"{name} is {value:g} on rank {ranks[0]} and {another:g} on rank {ranks[1]}"


class ReplicaConsistency:
    """A comparison of replicas each time the callbacks of a `fit` have run; a rank sends 8 bytes.

    A callback on one rank may change the weights or the optimizer. A callback may also change the
    first epoch or the end of training. All ranks then adopt the changes of the callback. A callback
    affects the whole training, as in one process.

    Args:
        model: Model with distributed optimizers.
        communicator: Communicator of the ranks, each of which has one replica.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._before = self._state()
        self._mentioned: set[str] = set()

    def attach_to_history(self, history: keras.callbacks.History) -> None:
        """Wrap the methods of the History callback, which Keras calls after all other callbacks."""
        for name in _POINTS:
            # An earlier `fit` has already wrapped the methods of a reused History object. The
            # History class still has the original method.
            inner = getattr(type(history), name).__get__(history)
            setattr(history, name, partial(self._compare_after, history, inner, name))

    def record_state(self) -> None:
        """Record the state of the replica before callbacks change it."""
        self._before = self._state()

    def compare_now(self, moment: str) -> None:
        """Compare the replicas at a moment when no callbacks have run since the last step.

        Raises:
            ReplicasDifferError: The replicas differ.
        """
        self.record_state()
        self._compare(moment)

    def _compare_after(
        self,
        history: keras.callbacks.History,
        inner: Callable[..., None],
        name: str,
        *arguments: Any,
        **named: Any,
    ) -> None:
        inner(*arguments, **named)
        epoch = arguments[0] if name.startswith("on_epoch") else 0
        self._compare(_POINTS[name].format(epoch + 1))
        if name == "on_train_end":
            for method_name in _POINTS:
                vars(history).pop(method_name, None)

    def _compare(self, moment: str) -> None:
        state, before, stops = self._state(), self._before, bool(self._model.stop_training)
        compared = state.shared, state.own_sums != before.own_sums, stops
        # The digest has 48 bits, which a float64 represents exactly.
        number = hashlib.blake2b(repr(compared).encode(), digest_size=6).digest()
        call = f"the comparison of replicas {moment}"
        for optimizer in distributed_optimizers(self._model):
            # Only one thread at a time may call MPI. The method `settle` therefore waits until the
            # gradient exchange thread is idle.
            optimizer.exchange.service.settle()
        numbers = self._communicator.allgather_scalar(float(int.from_bytes(number)), call)
        # The status board shows that the rank has left the comparison of replicas. Without the
        # entry, other ranks would report that the rank still waits.
        self._communicator.board.enter(f"work after {call}")
        if np.all(numbers == numbers[0]):
            return
        states = self._communicator.allgather((before, state, stops), call)
        self._adopt_changes(moment, [row[0] for row in states], [row[1] for row in states])
        if any(row[2] for row in states) and not all(row[2] for row in states):
            ranks = ", ".join(str(rank) for rank, row in enumerate(states) if row[2])
            self._print_once(f"a callback on rank {ranks} stops training {moment}: all ranks stop")
            self._model.stop_training = True

    def _adopt_changes(
        self, moment: str, before: Sequence[ReplicaState], after: Sequence[ReplicaState]
    ) -> None:
        """Broadcast the state of the rank whose callbacks have changed its replica.

        Raises:
            ReplicasDifferError: No rank has a state that all ranks can adopt.
        """
        if text := _first_difference(before):
            raise ReplicasDifferError(
                f"replicas differ {moment}: {text}. A callback on one rank has changed that rank's "
                "replica between steps, or precedes labkit's callbacks; give the callback to every "
                "rank, after labkit.keras.callbacks(communicator)"
            )
        pairs = list(zip(before, after, strict=True))
        shared = [rank for rank, (old, new) in enumerate(pairs) if old.shared != new.shared]
        changed = shared or [rank for rank, (old, new) in enumerate(pairs) if old != new]
        if not changed or (len(changed) == len(pairs) and not _first_difference(after)):
            return
        if text := _first_difference(after, changed):
            raise ReplicasDifferError(
                f"callbacks have made replicas different {moment}: {text}. Give the callback to "
                "one rank only, or let it make the same changes on all ranks"
            )
        root = changed[0]
        if after[root].trainable != before[root].trainable:
            raise ReplicasDifferError(
                f"a callback on rank {root} alone has changed which layers are trainable "
                f"{moment}: give the callback to every rank"
            )
        names = self._communicator.broadcast_object(
            _changes(*pairs[root]), root, "the changes that a callback made"
        )
        self._print_once(
            f"a callback on rank {root} alone changes {names}: all ranks adopt the change"
        )
        # A callback that restores weights may have built the optimizer on the rank `root` only.
        if len({len(state.sums) for state in after}) > 1 and not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)
        every = [*self._model.variables, *self._optimizer_variables]
        broadcast([v for v in every if v.name != _SEED], self._communicator, root)
        self._model._initial_epoch = after[root].first_epoch or None

    def _print_once(self, text: str) -> None:
        """Print a message on rank 0, but only once in each `fit`."""
        if text not in self._mentioned:
            self._mentioned.add(text)
            print_on_first_rank(self._communicator, text)

    @property
    def _optimizer_variables(self) -> list[keras.Variable]:
        """The optimizer variables that must be equal on all ranks, except gradient accumulators."""
        variables: list[keras.Variable] = []
        for optimizer in distributed_optimizers(self._model):
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            added_up = {id(v) for v in getattr(inner, "_accumulated_gradients", ())}
            variables += [v for v in optimizer.variables if id(v) not in added_up]
        return variables

    def _state(self) -> ReplicaState:
        layers = self._model._flatten_layers()
        # The list `weights` includes the weights of frozen layers, which Keras does not list as
        # trainable.
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
    """Copy the values of variables from rank `root` to all ranks (collective).

    Each rank adds its rank number to the seeds of random layers. The ranks therefore draw different
    random numbers.

    Args:
        variables: Variables, in the same order on every rank.
        communicator: Communicator of the ranks that receive the values.
        root: Rank whose values are copied; default: 0.

    Raises:
        InvalidInput: The variables of a rank differ from those of rank 0 in dtype, shape or number.
    """
    signature = [(str(variable.dtype), tuple(variable.shape)) for variable in variables]
    signatures = communicator.allgather(signature, "the comparison of the variables")
    for rank, other in enumerate(signatures):
        if other != signatures[0]:
            pairs = zip(signatures[0], other, strict=False)
            first = next(((a, b) for a, b in pairs if a != b), (len(signatures[0]), len(other)))
            raise InvalidInput(
                f"rank 0 and rank {rank} have different variables: {first[0]} and {first[1]}; "
                "give every rank the same model, optimizer, keras floatx and dtype policy"
            )
    for number, variable in enumerate(variables):
        value = np.array(variable.numpy(), order="C")
        # Error messages contain the number of a variable, because Keras's layer names may differ
        # between ranks.
        communicator.broadcast(value, root, f"the broadcast of variable {number}")
        if variable.name == "seed_generator_state":
            value[0] += communicator.rank
        variable.assign(value)


def _first_difference(states: Sequence[ReplicaState], ranks: Sequence[int] | None = None) -> str:
    """Describe the first difference between the states of ranks; return "" if there is none."""
    first, *others = range(len(states)) if ranks is None else ranks
    for rank in others:
        if states[rank].shared != states[first].shared:
            return states[first].difference(states[rank], (first, rank))
    return ""


def _changes(before: ReplicaState, after: ReplicaState) -> str:
    """Describe what the callbacks of a rank have changed."""
    places = [n for n, value in enumerate(after.sums) if before.sums[n : n + 1] != (value,)]
    if after.first_epoch != before.first_epoch:
        return f"the first epoch to {after.first_epoch + 1}"
    if not places:
        return "moving statistics"
    name, value = after.scalars[places[0]]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return (name if value is None else f"{name} to {value:g}") + more


def _checksum(variable: keras.Variable) -> int:
    """Return a checksum of a variable, which depends on the order of its elements."""
    return zlib.crc32(variable.numpy().tobytes())


# The tuple _ADDING lists optimizers that need only the sum of a word's gradients. The sum
# determines the update of the word's embedding.
_ADDING = (keras.optimizers.SGD, keras.optimizers.Lion, LARS)


@dataclass(frozen=True)
class Division:
    """The division of a batch among replicas and micro-batches.

    Attributes:
        replicas: Number of replicas; each replica trains on different samples.
        microbatches: Whether each replica divides its samples into micro-batches.
        known: Whether labkit knows how many samples a layer processes at once.
        synchronizes: Whether layers with synchronized=True normalize over the samples of all
            replicas.
    """

    replicas: int
    microbatches: bool
    known: bool = True
    synchronizes: bool = False

    @property
    def is_whole_batch(self) -> bool:
        """Whether each layer processes all samples of a batch at once, as in one process."""
        return self.known and self.replicas == 1 and not self.microbatches


def why_not(model: keras.Model, divided: Division) -> str | None:
    """Return why trained weights may differ from training in one process; None if they do not."""
    if type(model).train_step is not keras.Model.train_step:
        return "the model has a custom train_step, whose loss need not be a mean over samples"
    for layer in model._flatten_layers():
        if reason := _of_layer(layer, divided):
            return f"layer {layer.name!r} ({type(layer).__name__}) {reason}"
    return None


def embedding_difference(model: keras.Model) -> str | None:
    """Return why embedding weights may differ from plain Keras, or None if they are equal.

    Plain Keras passes one gradient row per occurrence of a word to the optimizer. Labkit passes the
    sum of the word's gradient rows. The sum leads to a different step if the optimizer squares or
    clips gradients.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    adds = type(optimizer).update_step in (
        optimizer_class.update_step for optimizer_class in _ADDING
    )
    if (
        adds and not clips
        # With gradient accumulation, embedding gradients are dense. Plain Keras then also sums the
        # gradients of a repeated word.
    ) or optimizer.gradient_accumulation_steps:
        return None
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Embedding) and layer.trainable:
            # A regularizer makes embedding gradients dense. Plain Keras then also sums the
            # gradients of a repeated word.
            if layer.embeddings_regularizer is not None:
                continue
            return (
                f"layer {layer.name!r} (Embedding): if a word occurs several times in a batch, "
                f"{type(optimizer).__name__} applies the sum of its gradients on ranks, but each "
                "gradient separately in plain Keras"
            )
    return None


def _of_layer(layer: keras.layers.Layer, divided: Division) -> str | None:
    if draws(layer):
        return "draws random numbers on each rank, which differ from those of one process"
    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        if divided.microbatches:
            return "normalises by each micro-batch; one process normalises by the whole batch"
        if not (divided.is_whole_batch or (divided.synchronizes and layer.synchronized)):
            return "normalises by the batch of each rank; one process uses the whole batch"
    if isinstance(layer, keras.layers.SpectralNormalization) and divided.microbatches:
        return "updates its vector per micro-batch; one process updates the vector per batch"
    return None


def draws_in_step(graph: tf.Graph) -> str | None:
    """Return which random operation makes a traced step differ from training in one process. Return
    None if the step draws no random numbers.
    """
    drawing = ("Random", "TruncatedNormal", "Multinomial")
    for operation in graph.get_operations():
        if any(kind in operation.type for kind in drawing):
            return f"{operation.name!r} draws random numbers on each rank, unlike one process"
    return None


def draws(layer: keras.layers.Layer) -> bool:
    """Return whether a layer draws random numbers in training.

    A layer with a seed generator may draw no random numbers. Recurrent cells have a seed generator
    even without dropout.
    """
    shares = [
        getattr(layer, name)
        for name in ("rate", "stddev", "dropout", "recurrent_dropout")
        if hasattr(layer, name)
    ]
    # The type of an attribute identifies a layer's seed generator. Augmentation layers and custom
    # layers may give the seed generator any name.
    generator = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return generator and (any(shares) or not shares)
