"""Carries out a rank's rows of a pipeline schedule on real micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.stages.microbatches import Batch, MicroBatches, Stretches
from labkit.model_parallel.stages.open_time import is_open
from labkit.model_parallel.stages.passing import Links, OwnLosses, Posted
from labkit.model_parallel.stages.stage import Stage
from labkit.schedules.pipeline import Table

Record: TypeAlias = Callable[[str, int, int], AbstractContextManager[None]]


class Runner:
    """Runs training steps of one rank's stages.

    Args:
        communicator: the ranks of one replica, in the order of the stages.
        table: the schedule.
        stages: those of this rank, by their number in the model.
        inputs: of every stage, the tensor that comes in: its shape without rows, and its dtype.
        outputs: of every stage, likewise.
        record: of (action, stage, micro-batch), stands around each row.

    Attributes:
        rows: behind the gradients that `update` finds: of the batch, or of the micro-batch where
            the schedule is asynchronous.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: Table,
        stages: Mapping[int, Stage],
        inputs: Sequence[keras.KerasTensor],
        outputs: Sequence[keras.KerasTensor],
        record: Record,
    ) -> None:
        self.communicator, self.table, self.stages = communicator, table, dict(stages)
        self.links, self._record = Links(communicator, inputs, outputs), record
        self._rows = table.of_rank(communicator.rank).rows()
        self.last = table.stages - 1
        self.rows = 0
        self.own_losses = OwnLosses(communicator)
        self._opened = [is_open(tensor) for tensor in [*inputs, outputs[-1]]]

    def step(self, batch: Batch, update: Callable[[int], None]) -> float | None:
        """One batch forward and backward; the loss on the rank of the last stage, else None.

        Args:
            batch: the same on all ranks of the replica.
            update: called with a stage's number when its weights may change.
        """
        parts = self._parts(batch)
        under_way = _UnderWay(self, parts)
        for _, stage, action, number, peer in self._rows:
            # A message belongs to the later of its two stages: what that one does not take, such as
            # a micro-batch without rows, is neither computed nor sent, on both ranks alike.
            if parts.reaches(number, max(stage, peer)):
                with self._record(action, stage, number):
                    under_way.carry_out(action, stage, number, peer)
            # Without a flush at the end every backward is followed by its update at once.
            if self.table.asynchronous and action == "backward":
                self.rows = parts.rows(number)
                update(stage)
        # Sends are finished here and not before: a rank that waits for its send to arrive while its
        # peer does the same would wait forever.
        self.communicator.finish(under_way.posted)
        if not self.table.asynchronous:
            self.rows = len(batch.x)
            for stage in self.stages:
                update(stage)
        return self.own_losses.added_to(under_way.loss) if len(batch.x) else None

    def _parts(self, batch: Batch) -> MicroBatches:
        if self.table.recurrent:
            return Stretches(batch, self.table.microbatches, self._opened)
        return MicroBatches(batch, self.table.microbatches)


class _UnderWay:
    """A batch in the pipeline: what this rank holds of it between two rows of the schedule."""

    def __init__(self, runner: Runner, parts: MicroBatches) -> None:
        self._runner, self._parts = runner, parts
        # By kind, the stage it is for, and micro-batch.
        self._held: dict[tuple[str, int, int], tf.Tensor | None] = {}
        self.posted: Posted = []
        self.loss: float | None = 0.0 if runner.last in runner.stages else None

    def carry_out(self, action: str, stage: int, number: int, peer: int) -> None:
        """One row of the schedule."""
        if action == "receive":
            size = self._parts.size(number, max(stage, peer))
            value = self._runner.links.receive(stage, peer, *size)
            self._held[_kind(peer < stage), stage, number] = value
        elif action == "send":
            value = self._held.pop((_kind(peer > stage), peer, number))
            self.posted += self._runner.links.send(value, stage, peer)
        elif action == "forward":
            self._forward(stage, number)
        elif action == "backward_weight":
            self._runner.stages[stage].backward_weight(number)
        else:
            gradient = self._held.pop((_kind(False), stage, number), None)
            own = self._runner.stages[stage]
            found = own.backward(number, gradient, action == "backward_input")
            if stage > 0:
                self._held[_kind(False), stage - 1, number] = found

    def _forward(self, stage: int, number: int) -> None:
        x = self._parts.input(number) if stage == 0 else self._held.pop(("x", stage, number))
        targets, share = self._parts.targets(number), self._parts.share(number)
        # Each micro-batch has an update of its own, and counts whole; or all have one together, and
        # it counts by its share of the batch.
        counts = 1.0 if self._runner.table.asynchronous else share
        own = self._runner.stages[stage]
        found = own.forward(number, x, counts, targets)
        self._runner.own_losses.take(own.own_loss, share / counts)
        if stage < self._runner.last:
            self._held["x", stage + 1, number] = found
        elif found is not None:  # a stretch of time may have no answer yet
            self.loss = (self.loss or 0.0) + float(found) * share / counts


def _kind(forth: bool) -> str:
    return "x" if forth else "dy"
