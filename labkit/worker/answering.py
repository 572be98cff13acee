"""Inference servers: rank 0 receives batches of rows, and all ranks compute the predictions.

one process     0: F F F F
replicas        0: F F   ◄ parts of a batch, or whole batches in turn, go to the other ranks
                1: F F
stages          0: F F F F
                1:   F F F F   ► the last stage sends its predictions to rank 0
slices          0: F F F F
                1: F F F F     all ranks receive all rows, and slices sum their activations
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.memory import unique_nbytes
from labkit.model_parallel.weights import free
from labkit.strategies import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

    from labkit.strategies import Serving

Rows: TypeAlias = "np.ndarray"  # (rows, …)


class InferenceServer(Protocol):
    """An inference server; all ranks call its methods, but only rank 0 must pass the actual rows.

    Attributes:
        weights_bytes: Total bytes of the weights on this rank.
    """

    weights_bytes: int

    def batch(self, x: Rows) -> Rows | None:
        """Predict one batch with minimal latency; the result is None on all ranks except rank 0."""

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        """Return predictions for several batches, whose transfers overlap the computation."""


def inference_server(
    communicator: Communicator, model: keras.Model, strategy: Strategy | None, like: Rows
) -> InferenceServer:
    """Return an inference server that divides the work as a strategy does.

    Args:
        communicator: Communicator of the ranks that compute predictions.
        model: Whole model, equal on all ranks. When the model is divided, each rank frees the
            weights that belong to other ranks.
        strategy: Strategy that divides the model, see `Strategy.serving`. If `strategy` is None,
            rank 0 computes alone.
        like: An example of predictions, which defines the dtype and the shape per row of all
            predictions.
    """
    if strategy is None:
        return _SingleProcess(communicator, model)
    serving = strategy.serving(model, communicator)
    if serving is None:
        return _Replicas(communicator, model, like)
    return _PartitionedModel(communicator, model, serving, like)


def forward(model: keras.Model) -> Callable[[Rows], Rows]:
    """Return a model's forward pass as a compiled function, which is faster than `predict`."""
    compiled = tf.function(
        lambda x: model(x, training=False), autograph=False, reduce_retracing=True
    )
    return lambda x: np.asarray(compiled(tf.convert_to_tensor(x)))


class _SingleProcess:
    """An inference server in which only rank 0 computes."""

    def __init__(self, communicator: Communicator, model: keras.Model) -> None:
        self._first, self._call = communicator.rank == 0, forward(model)
        self.weights_bytes = unique_nbytes(model.variables) if self._first else 0

    def batch(self, x: Rows) -> Rows | None:
        return self._call(x) if self._first else None

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        return [self._call(x) for x in batches] if self._first else []


class _Transfers:
    """Messages between rank 0 and other ranks; sent arrays are stored until they have arrived."""

    def __init__(self, communicator: Communicator, like: Rows) -> None:
        self.communicator, self.rank, self._like = communicator, communicator.rank, like
        self._posted: list[tuple[list[MPI.Request], Rows]] = []

    def post(self, data: Rows, rank: int) -> None:
        """Start a non-blocking send of an array to a rank."""
        data = np.ascontiguousarray(data)
        self._posted.append((self.communicator.post(data, rank), data))

    def rows(self, like: Rows) -> Rows:
        """Receive rows with the shape and dtype of `like` from rank 0."""
        buffer = np.empty_like(like, order="C")
        self.communicator.recv(buffer, 0)
        return buffer

    def answer(self, rows: int, rank: int) -> Rows:
        """Receive the predictions for a number of rows from another rank."""
        buffer = np.empty((rows, *self._like.shape[1:]), self._like.dtype)
        self.communicator.recv(buffer, rank)
        return buffer

    def finish(self) -> None:
        """Wait until all started sends complete."""
        for requests, _ in self._posted:
            self.communicator.finish(requests)
        self._posted.clear()


class _Replicas:
    """An inference server; each rank has the whole model and predicts some of the rows."""

    def __init__(self, communicator: Communicator, model: keras.Model, like: Rows) -> None:
        self._size, self._call = communicator.size, forward(model)
        self._transfers = _Transfers(communicator, like)
        self.weights_bytes = unique_nbytes(model.variables)

    def batch(self, x: Rows) -> Rows | None:
        # If the division is uneven, rank 0 takes the most rows, because its rows need no transfer.
        parts = np.array_split(x, self._size)
        return self._answers(parts)

    def _answers(self, parts: list[Rows]) -> Rows | None:
        transfers, local_rows = self._transfers, parts[self._transfers.rank]
        if transfers.rank:
            if len(local_rows):
                transfers.post(self._call(transfers.rows(local_rows)), 0)
                transfers.finish()
            return None
        others = [(rank, part) for rank, part in enumerate(parts) if rank and len(part)]
        for rank, part in others:
            transfers.post(part, rank)
        outputs = [
            self._call(local_rows),
            *(transfers.answer(len(part), rank) for rank, part in others),
        ]
        transfers.finish()
        return np.concatenate(outputs)

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        transfers = self._transfers
        if transfers.rank:
            for x in batches[transfers.rank :: self._size]:
                transfers.post(self._call(transfers.rows(x)), 0)
            transfers.finish()
            return []
        rounds = [
            batches[start : start + self._size] for start in range(0, len(batches), self._size)
        ]
        outputs: dict[int, Rows] = {}
        self._send(rounds[0])
        for number, (current, following) in enumerate(pairwise([*rounds, []])):
            # The transfer of the next batch overlaps the computation of the current batch.
            self._send(following)
            outputs[number * self._size] = self._call(current[0])
        for number, x in enumerate(batches):
            if number % self._size:
                outputs[number] = transfers.answer(len(x), number % self._size)
        transfers.finish()
        return [outputs[number] for number in range(len(batches))]

    def _send(self, batches: Sequence[Rows]) -> None:
        for rank, x in enumerate(batches):
            if rank:
                self._transfers.post(x, rank)


class _PartitionedModel:
    """An inference server in which each rank has a part of the model: a stage or a slice."""

    def __init__(
        self, communicator: Communicator, model: keras.Model, serving: Serving, like: Rows
    ) -> None:
        self._transfers, self._predict = _Transfers(communicator, like), serving.predict
        reads = communicator.allgather(serving.reads, "the ranks that read rows")
        self._readers = [rank for rank, does in enumerate(reads) if does and rank]
        # The attribute `_holder` is the rank that has the predictions, which is known only after
        # one batch.
        self._holder: int | None = None
        kept_ids = {id(variable) for variable in serving.variables}
        for variable in model.variables:
            if id(variable) not in kept_ids:
                free(variable)
        self.weights_bytes = unique_nbytes(model.variables, serving.variables)

    def batch(self, x: Rows) -> Rows | None:
        outputs = self.stream([x])
        return outputs[0] if outputs else None

    def stream(self, batches: Sequence[Rows]) -> list[Rows]:
        transfers, outputs = self._transfers, []
        for y, _ in self._predict(self._received_batches(batches)):
            if self._holder is None:
                holds_outputs = transfers.communicator.allgather(
                    y is not None, "the rank that has the predictions"
                )
                self._holder = holds_outputs.index(True)
            if y is not None and transfers.rank:
                transfers.post(np.asarray(y), 0)
            elif y is not None:
                outputs.append(np.asarray(y))
        if transfers.rank == 0 and self._holder:
            outputs = [transfers.answer(len(x), self._holder) for x in batches]
        transfers.finish()
        return outputs

    def _received_batches(self, batches: Sequence[Rows]) -> Iterator[Rows]:
        transfers = self._transfers
        if transfers.rank in self._readers:
            yield from map(transfers.rows, batches)
        elif transfers.rank:
            # Ranks that receive no input pass zeros, because they need only the shape of the input.
            yield from map(np.zeros_like, batches)
        else:
            self._send(batches[0])
            for current, following in pairwise([*batches, None]):
                # The transfer of the next batch overlaps the computation of the current batch.
                self._send(following)
                # The assertion tells the type checker that only the last batch is None.
                assert current is not None
                yield current

    def _send(self, x: Rows | None) -> None:
        for rank in self._readers if x is not None else ():
            assert x is not None
            self._transfers.post(x, rank)
