"""Ways to answer batches of rows that come to rank 0, which wants the answers back.

one process     0: F F F F
replicas        0: F F   ◄ parts of a batch, or batches in turn, go to the others and come back
                1: F F
stages          0: F F F F
                1:   F F F F   ► the last one sends its answers to rank 0
slices          0: F F F F
                1: F F F F     rows go to all; slices add up on the way
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.memory import together
from labkit.model_parallel.weights import free
from labkit.strategies import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

    from labkit.strategies import Serving

Rows: TypeAlias = "np.ndarray"  # (rows, …)


class Answers(Protocol):
    """A way to answer. All calls are collective; rows count on rank 0, elsewhere their shape does.

    Attributes:
        weights_bytes: what this rank holds of the model.
    """

    weights_bytes: int

    def batch(self, x: Rows) -> Rows | None:
        """The answers to one batch as soon as can be, on rank 0."""

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        """The answers to batches that lie ready, with several under way where that is possible."""


def way(
    communicator: Communicator, model: keras.Model, strategy: Strategy | None, like: Rows
) -> Answers:
    """How ranks answer by a strategy; None: rank 0 alone.

    Args:
        communicator: the ranks.
        model: the whole one, the same on all; cut, it loses what others hold.
        strategy: see `Strategy.serving`.
        like: an answer to some rows, which says of what shape and type answers are.
    """
    if strategy is None:
        return _Alone(communicator, model)
    serving = strategy.serving(model, communicator)
    if serving is None:
        return _Replicas(communicator, model, like)
    return _Together(communicator, model, serving, like)


def forward(model: keras.Model) -> Callable[[Rows], Rows]:
    """A model as a compiled function, as stages and slices are, too: Keras's loop takes longer."""
    compiled = tf.function(
        lambda x: model(x, training=False), autograph=False, reduce_retracing=True
    )
    return lambda x: np.asarray(compiled(tf.convert_to_tensor(x)))


class _Alone:
    """Rank 0 has the model, and others do nothing."""

    def __init__(self, communicator: Communicator, model: keras.Model) -> None:
        self._first, self._call = communicator.rank == 0, forward(model)
        self.weights_bytes = together(model.variables) if self._first else 0

    def batch(self, x: Rows) -> Rows | None:
        return self._call(x) if self._first else None

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        return [self._call(x) for x in batches] if self._first else []


class _Exchanged:
    """Arrays between rank 0 and others; what was posted is kept until it is on its way."""

    def __init__(self, communicator: Communicator, like: Rows) -> None:
        self.communicator, self.rank, self._like = communicator, communicator.rank, like
        self._posted: list[tuple[list[MPI.Request], Rows]] = []

    def post(self, data: Rows, rank: int) -> None:
        """Begin to send."""
        data = np.ascontiguousarray(data)
        self._posted.append((self.communicator.post(data, rank), data))

    def rows(self, like: Rows) -> Rows:
        """From rank 0."""
        found = np.empty_like(like, order="C")
        self.communicator.recv(found, 0)
        return found

    def answer(self, rows: int, rank: int) -> Rows:
        """From another rank, to so many rows."""
        found = np.empty((rows, *self._like.shape[1:]), self._like.dtype)
        self.communicator.recv(found, rank)
        return found

    def finish(self) -> None:
        """Wait for all that was posted."""
        for requests, _ in self._posted:
            self.communicator.finish(requests)
        self._posted.clear()


class _Replicas:
    """Each rank has the whole model: a batch alone is divided, several go round."""

    def __init__(self, communicator: Communicator, model: keras.Model, like: Rows) -> None:
        self._size, self._call = communicator.size, forward(model)
        self._exchanged = _Exchanged(communicator, like)
        self.weights_bytes = together(model.variables)

    def batch(self, x: Rows) -> Rows | None:
        # Rank 0 takes a row more than others where they do not come out even: its own need not
        # travel.
        parts = np.array_split(x, self._size)
        return self._answers(parts)

    def _answers(self, parts: list[Rows]) -> Rows | None:
        exchanged, own = self._exchanged, parts[self._exchanged.rank]
        if exchanged.rank:
            if len(own):
                exchanged.post(self._call(exchanged.rows(own)), 0)
                exchanged.finish()
            return None
        others = [(rank, part) for rank, part in enumerate(parts) if rank and len(part)]
        for rank, part in others:
            exchanged.post(part, rank)
        found = [self._call(own), *(exchanged.answer(len(part), rank) for rank, part in others)]
        exchanged.finish()
        return np.concatenate(found)

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        exchanged = self._exchanged
        if exchanged.rank:
            for x in batches[exchanged.rank :: self._size]:
                exchanged.post(self._call(exchanged.rows(x)), 0)
            exchanged.finish()
            return []
        rounds = [
            batches[start : start + self._size] for start in range(0, len(batches), self._size)
        ]
        found: dict[int, Rows] = {}
        self._give(rounds[0])
        for number, (now, then) in enumerate(pairwise([*rounds, []])):
            self._give(then)  # the next one travels while this one is computed
            found[number * self._size] = self._call(now[0])
        for number, x in enumerate(batches):
            if number % self._size:
                found[number] = exchanged.answer(len(x), number % self._size)
        exchanged.finish()
        return [found[number] for number in range(len(batches))]

    def _give(self, batches: Sequence[Rows]) -> None:
        for rank, x in enumerate(batches):
            if rank:
                self._exchanged.post(x, rank)


class _Together:
    """Each rank has a part of the model, in stages or slices."""

    def __init__(
        self, communicator: Communicator, model: keras.Model, serving: Serving, like: Rows
    ) -> None:
        self._exchanged, self._predict = _Exchanged(communicator, like), serving.predict
        reads = communicator.allgather(serving.reads, "who reads rows")
        self._readers = [rank for rank, does in enumerate(reads) if does and rank]
        self._holder: int | None = None  # of the answers; known after the first one
        kept = {id(variable) for variable in serving.variables}
        for variable in model.variables:
            if id(variable) not in kept:
                free(variable)
        self.weights_bytes = together(model.variables, serving.variables)

    def batch(self, x: Rows) -> Rows | None:
        found = self.stream([x])
        return found[0] if found else None

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        exchanged, found = self._exchanged, []
        for y, _ in self._predict(self._given(batches)):
            if self._holder is None:
                held = exchanged.communicator.allgather(y is not None, "who holds the answers")
                self._holder = held.index(True)
            if y is not None and exchanged.rank:
                exchanged.post(np.asarray(y), 0)
            elif y is not None:
                found.append(np.asarray(y))
        if exchanged.rank == 0 and self._holder:
            found = [exchanged.answer(len(x), self._holder) for x in batches]
        exchanged.finish()
        return found

    def _given(self, batches: Sequence[Rows]) -> Iterator[Rows]:
        exchanged = self._exchanged
        if exchanged.rank in self._readers:
            yield from map(exchanged.rows, batches)
        elif exchanged.rank:
            yield from map(np.zeros_like, batches)  # only their number and shape count here
        else:
            self._give(batches[0])
            for now, then in pairwise([*batches, None]):
                self._give(then)  # travels while this one is computed
                assert now is not None  # for the type checker: only the last one is
                yield now

    def _give(self, x: Rows | None) -> None:
        for rank in self._readers if x is not None else ():
            assert x is not None  # for the type checker
            self._exchanged.post(x, rank)
