"""What passes between stages on different ranks: outputs forth, gradients back, losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.stages.model_blocks import INPUTS, Source
from labkit.model_parallel.stages.stage import Passed, is_number, listed, plain

if TYPE_CHECKING:
    from mpi4py import MPI

Posted: TypeAlias = "list[MPI.Request]"  # what `Communicator.finish` takes
Ends: TypeAlias = "Sequence[keras.KerasTensor | Sequence[keras.KerasTensor]]"


class Links:
    """Messages between the stages of one replica; stage s is on rank s mod ranks.

    A tensor travels straight from the stage that makes it to each stage that reads it, and its
    gradients come back the same way.

    Args:
        communicator: the ranks of the replica, in the order of the stages.
        inputs: of every stage, the tensors that come in: shapes without rows, and dtypes.
        outputs: of every stage, likewise.
        takes: of every stage, where each input comes from; None: from the stage before.
    """

    def __init__(
        self,
        communicator: Communicator,
        inputs: Ends,
        outputs: Ends,
        takes: Sequence[Sequence[Source]] | None = None,
    ) -> None:
        self.communicator = communicator
        self.inputs, self.outputs = [*map(listed, inputs)], [*map(listed, outputs)]
        chain = [[Source(stage - 1, 0)] for stage in range(len(inputs))]  # of which -1 is `INPUTS`
        self.takes = chain if takes is None else takes

    def send(self, value: tf.Tensor, stage: int, peer: int) -> Posted:
        """Begin to send a tensor of a stage to a peer."""
        # Posted, not sent: the receiver may be busy with other rows of the schedule for long.
        data = np.ascontiguousarray(value)
        return self.communicator.post(data, peer % self.communicator.size, self._tag(stage, peer))

    def receive(
        self, spec: keras.KerasTensor, stage: int, peer: int, size: Sequence[int]
    ) -> tf.Tensor:
        """The tensor that a peer has sent to a stage; its first axes: rows, or rows and steps."""
        data = np.empty((*size, *spec.shape[len(size) :]), tf.as_dtype(spec.dtype).as_numpy_dtype)
        self.communicator.recv(data, peer % self.communicator.size, self._tag(peer, stage))
        return tf.constant(data)

    def readers(self, stage: int, number: int) -> list[tuple[int, int]]:
        """The stages that read an output of a stage, and as which of their inputs."""
        return [
            (reader, place)
            for reader, sources in enumerate(self.takes)
            for place, source in enumerate(sources)
            if source == (stage, number)
        ]

    def is_here(self, stage: int) -> bool:
        """Whether a stage is on this rank."""
        return stage % self.communicator.size == self.communicator.rank

    def _tag(self, source: int, destination: int) -> int:
        """Of each pair of stages its own: between two ranks there may be several."""
        return source * len(self.takes) + destination


class Passing:
    """The tensors between stages that a rank holds: what it has received, and what it will send.

    They go by their stage and a number: of the micro-batch, or of the iteration.

    Args:
        links: to the other stages.

    Attributes:
        posted: what has been sent and may be under way.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.posted: Posted = []
        # By the stage that reads it, as which input, and number; by the stage that has made it, as
        # which output, and number.
        self._inputs: dict[tuple[int, int, int], tf.Tensor] = {}
        self._gradients: dict[tuple[int, int, int], tf.Tensor] = {}
        # By the stage that sends it, the way, and number: to whom.
        self._sent: dict[tuple[int, bool, int], list[tuple[tf.Tensor, int]]] = {}

    def give(self, stage: int, number: int, outputs: Passed) -> None:
        """A stage has made its outputs."""
        away = self._sent[stage, True, number] = []
        for place, value in enumerate(listed(outputs)):
            for reader, at in self._links.readers(stage, place):
                if self._links.is_here(reader):
                    self._inputs[reader, at, number] = value
                else:
                    away.append((value, reader))

    def take(self, stage: int, number: int, read: Sequence[tf.Tensor]) -> Passed:
        """The inputs of a stage, of which some are read from the batch."""
        return plain(
            [
                read[source.number]
                if source.stage == INPUTS
                else self._inputs.pop((stage, place, number))
                for place, source in enumerate(self._links.takes[stage])
            ]
        )

    def give_back(self, stage: int, number: int, gradients: Passed) -> None:
        """A stage has made the gradients of its inputs."""
        away = self._sent[stage, False, number] = []
        for value, source in zip(listed(gradients), self._links.takes[stage], strict=True):
            if value is None:
                continue
            if self._links.is_here(source.stage):
                self._add(source, number, value)
            else:
                away.append((value, source.stage))

    def take_back(self, stage: int, number: int) -> Passed:
        """The gradients of a stage's outputs, each the sum of what its readers have returned."""
        places = range(len(self._links.outputs[stage]))
        return plain([self._gradients.pop((stage, place, number), None) for place in places])

    def send(self, stage: int, forth: bool, number: int) -> None:
        """Send what a stage has given, or given back."""
        for value, peer in self._sent.pop((stage, forth, number)):
            self.posted += self._links.send(value, stage, peer)

    def receive(self, stage: int, forth: bool, number: int, size: Sequence[int]) -> None:
        """Receive the inputs of a stage from other ranks, or the gradients of its outputs."""
        links = self._links
        # Of two stages the one sends in the order in which the other one receives: that of the
        # outputs of the former.
        if forth:
            for place, source in enumerate(links.takes[stage]):
                if source.stage != INPUTS and not links.is_here(source.stage):
                    spec = links.inputs[stage][place]
                    value = links.receive(spec, stage, source.stage, size)
                    self._inputs[stage, place, number] = value
            return
        for place, spec in enumerate(links.outputs[stage]):
            for reader, _ in links.readers(stage, place):
                if is_number(spec) and not links.is_here(reader):
                    value = links.receive(spec, stage, reader, size)
                    self._add(Source(stage, place), number, value)

    def _add(self, source: Source, number: int, value: tf.Tensor) -> None:
        key = (*source, number)
        self._gradients[key] = self._gradients[key] + value if key in self._gradients else value


class OwnLosses:
    """Adds up what the layers of all stages have added in a step: regularizers and the like.

    Where any stage has such losses it takes a sum over the ranks a step, outside of the traffic:
    those of a lane meet once a step. Where none has, nothing but one question after the first step.

    Args:
        communicator: the ranks of all stages.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._there = False  # on this rank
        self._anywhere: bool | None = None  # not known yet
        self._sum = 0.0

    def take(self, own: tf.Tensor | None, weight: float = 1.0) -> None:
        """What the layers of a stage have added in a forward pass; None: they never do."""
        if own is not None:
            self._there = True
            self._sum += float(own) * weight

    def added_to(self, loss: float | None) -> float | None:
        """The loss with those of all layers, where there is one (collective)."""
        # Asked after the first forward pass, not before: layers add losses when they are called.
        if self._anywhere is None:
            everyone = self._communicator.allgather(self._there, "whether layers have losses")
            self._anywhere = any(everyone)
        if not self._anywhere:
            return loss
        total, self._sum = self._communicator.total(self._sum, "the losses of layers"), 0.0
        return None if loss is None else loss + total
