"""Messages between pipeline stages on different ranks: layer outputs, gradients, and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.stages.model_blocks import INPUTS, TensorSource
from labkit.model_parallel.stages.stage import Passed, as_list, is_number, unwrap_single

if TYPE_CHECKING:
    from mpi4py import MPI

# The type `Posted` is a list of pending MPI requests, which `Communicator.finish` completes.
Posted: TypeAlias = "list[MPI.Request]"
Ends: TypeAlias = "Sequence[keras.KerasTensor | Sequence[keras.KerasTensor]]"


class StageMessages:
    """Messages between the stages of one replica; with R ranks, stage s is on rank s mod R.

    A tensor is sent directly from the stage that produces it to each stage that reads it. Each
    stage that reads a tensor computes a gradient of the tensor. The gradients are sent directly to
    the stage that produces the tensor.

    Args:
        communicator: Communicator of the replica's ranks, in stage order.
        inputs: Symbolic input tensors of every stage, which give the dtypes, and the shapes without
            the row axis.
        outputs: Symbolic output tensors of every stage.
        takes: Sources of every stage's inputs; None if each stage reads the previous stage's
            output.
    """

    def __init__(
        self,
        communicator: Communicator,
        inputs: Ends,
        outputs: Ends,
        takes: Sequence[Sequence[TensorSource]] | None = None,
    ) -> None:
        self.communicator = communicator
        self.inputs, self.outputs = [*map(as_list, inputs)], [*map(as_list, outputs)]
        chain = [
            [TensorSource(stage - 1, 0)] for stage in range(len(inputs))
        ]  # for stage 0, the source stage is -1, which is `INPUTS`
        self.takes = chain if takes is None else takes

    def send(self, value: tf.Tensor, stage: int, peer: int) -> Posted:
        """Start to send a stage's tensor to another stage, `peer`; return the pending requests."""
        # The send does not block. The receiving rank may have to execute other actions of the
        # schedule first.
        data = np.ascontiguousarray(value)
        return self.communicator.post(data, peer % self.communicator.size, self._tag(stage, peer))

    def receive(
        self, spec: keras.KerasTensor, stage: int, peer: int, size: Sequence[int]
    ) -> tf.Tensor:
        """Return the tensor that stage `peer` sends; `size` is (rows,) or (rows, time steps)."""
        data = np.empty((*size, *spec.shape[len(size) :]), tf.as_dtype(spec.dtype).as_numpy_dtype)
        self.communicator.recv(data, peer % self.communicator.size, self._tag(peer, stage))
        return tf.constant(data)

    def readers(self, stage: int, number: int) -> list[tuple[int, int]]:
        """Return (stage, input index) of each stage input that reads a given output of a stage."""
        return [
            (reader, place)
            for reader, sources in enumerate(self.takes)
            for place, source in enumerate(sources)
            if source == (stage, number)
        ]

    def is_here(self, stage: int) -> bool:
        """Return whether a stage is on this rank."""
        return stage % self.communicator.size == self.communicator.rank

    def _tag(self, source: int, destination: int) -> int:
        """Return a message tag for a pair of stages; two ranks may have several pairs of stages."""
        return source * len(self.takes) + destination


class Passing:
    """A rank's store for tensors that it has received and tensors that it will send.

    The key of a tensor contains its stage and the number of its micro-batch or iteration.

    Args:
        links: Messages to and from the other stages (`StageMessages`).

    Attributes:
        posted: Requests of sends that may still be pending.
    """

    def __init__(self, links: StageMessages) -> None:
        self._links = links
        self.posted: Posted = []
        # The keys of `_inputs` are (reading stage, input index, micro-batch number). The keys of
        # `_gradients` are (producing stage, output index, micro-batch number).
        self._inputs: dict[tuple[int, int, int], tf.Tensor] = {}
        self._gradients: dict[tuple[int, int, int], tf.Tensor] = {}
        # The dict `_sent` maps (sending stage, whether forward, micro-batch number) to a list of
        # pairs (tensor, receiving stage).
        self._sent: dict[tuple[int, bool, int], list[tuple[tf.Tensor, int]]] = {}

    def store_outputs(self, stage: int, number: int, outputs: Passed) -> None:
        """Store the outputs of a stage for the stages that read them, on this or other ranks."""
        remote = self._sent[stage, True, number] = []
        for place, value in enumerate(as_list(outputs)):
            for reader, at in self._links.readers(stage, place):
                if self._links.is_here(reader):
                    self._inputs[reader, at, number] = value
                else:
                    remote.append((value, reader))

    def take(self, stage: int, number: int, read: Sequence[tf.Tensor]) -> Passed:
        """Return the inputs of a stage; inputs of the whole model are taken from `read`."""
        return unwrap_single(
            [
                read[source.number]
                if source.stage == INPUTS
                else self._inputs.pop((stage, place, number))
                for place, source in enumerate(self._links.takes[stage])
            ]
        )

    def store_gradients(self, stage: int, number: int, gradients: Passed) -> None:
        """Store the gradients of a stage's inputs for the stages that produced these inputs."""
        remote = self._sent[stage, False, number] = []
        for value, source in zip(as_list(gradients), self._links.takes[stage], strict=True):
            if value is None:
                continue
            if self._links.is_here(source.stage):
                self._add(source, number, value)
            else:
                remote.append((value, source.stage))

    def pop_gradients(self, stage: int, number: int) -> Passed:
        """Return the gradients of a stage's outputs, each summed over the stages that read it."""
        places = range(len(self._links.outputs[stage]))
        return unwrap_single(
            [self._gradients.pop((stage, place, number), None) for place in places]
        )

    def send(self, stage: int, forward: bool, number: int) -> None:
        """Send a stage's outputs if `forward` is true; otherwise, send its stored gradients."""
        for value, peer in self._sent.pop((stage, forward, number)):
            self.posted += self._links.send(value, stage, peer)

    def receive(self, stage: int, forward: bool, number: int, size: Sequence[int]) -> None:
        """Receive a stage's inputs if `forward` is true, or else the gradients of its outputs."""
        links = self._links
        # Tensors are received in the order in which they are sent. A stage sends its tensors in the
        # order of its outputs.
        if forward:
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
                    self._add(TensorSource(stage, place), number, value)

    def _add(self, source: TensorSource, number: int, value: tf.Tensor) -> None:
        key = (*source, number)
        self._gradients[key] = self._gradients[key] + value if key in self._gradients else value


class OwnLosses:
    """Sum of the losses (such as regularizers) that layers of all stages add in a training step.

    If any layer adds losses, each training step needs one sum over the ranks. The bytes of the sum
    of losses are not counted. The ranks check in the first training step whether any layer adds
    losses. If no layer adds losses, later training steps need no sum of losses.

    Args:
        communicator: Communicator of the ranks of all stages.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # The flag `_has_losses` states whether layers on this rank add losses to the model's loss.
        self._has_losses = False
        # The flag `_anywhere` states whether layers on any rank add losses; None means unknown.
        self._anywhere: bool | None = None
        self._sum = 0.0

    def take(self, losses: tf.Tensor | None, weight: float = 1.0) -> None:
        """Add the losses that a stage's layers produce in a forward pass; None adds nothing."""
        if losses is not None:
            self._has_losses = True
            self._sum += float(losses) * weight

    def added_to(self, loss: float | None) -> float | None:
        """Return `loss` plus the layers' losses of all stages, or None if `loss` is None."""
        # Layers add losses only when they are called. After the first forward pass, the ranks learn
        # whether any layer adds losses.
        if self._anywhere is None:
            flags = self._communicator.allgather(self._has_losses, "whether layers add losses")
            self._anywhere = any(flags)
        if not self._anywhere:
            return loss
        total, self._sum = self._communicator.total(self._sum, "the losses that layers add"), 0.0
        return None if loss is None else loss + total
