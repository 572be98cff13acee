"""Carries out a rank's rows of a pipeline schedule on real micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.losses import Counts, Losses
from labkit.model_parallel.stages.microbatches import Batch, MicroBatches, Stretches
from labkit.model_parallel.stages.model_blocks import Source
from labkit.model_parallel.stages.open_time import is_open
from labkit.model_parallel.stages.passing import Ends, Links, OwnLosses, Passing
from labkit.model_parallel.stages.stage import Stage, listed
from labkit.schedules.pipeline import Table

Record: TypeAlias = Callable[[str, int, int], AbstractContextManager[None]]


class Runner:
    """Runs training steps of one rank's stages.

    Args:
        communicator: the ranks of one replica, in the order of the stages.
        table: the schedule.
        stages: those of this rank, by their number in the model.
        inputs, outputs, takes: as of `Links`.
        record: of (action, stage, micro-batch), stands around each row.
        losses: what the last stage minimises; it is given (sample weights, what they count). None:
            of each micro-batch its rows count, and the last stage is given sample weights.

    Attributes:
        rows: behind the gradients that `update` finds: of the batch, or of the micro-batch where
            the schedule is asynchronous.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: Table,
        stages: Mapping[int, Stage],
        inputs: Ends,
        outputs: Ends,
        record: Record,
        losses: Losses | None = None,
        takes: Sequence[Sequence[Source]] | None = None,
    ) -> None:
        self.losses = losses if table.stages - 1 in stages else None
        self.communicator, self.table, self.stages = communicator, table, dict(stages)
        self.links, self._record = Links(communicator, inputs, outputs, takes), record
        self._rows = table.of_rank(communicator.rank).rows()
        self.last = table.stages - 1
        self.rows = 0
        self.own_losses = OwnLosses(communicator)
        ends = [*self.links.inputs, self.links.outputs[-1]]
        self._opened = [any(map(is_open, tensors)) for tensors in ends]

    def step(self, batch: Batch, update: Callable[[int], None]) -> float | None:
        """One batch forward and backward; the loss on the rank of the last stage, else None.

        Args:
            batch: the same on all ranks of the replica.
            update: called with a stage's number when its weights may change.
        """
        parts = self._parts(batch)
        under_way = _UnderWay(self, parts, self._counts(batch, parts))
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
        self.communicator.finish(under_way.passing.posted)
        if not self.table.asynchronous:
            self.rows = batch.rows
            for stage in self.stages:
                update(stage)
        return self.own_losses.added_to(under_way.loss) if batch.rows else None

    def _counts(self, batch: Batch, parts: MicroBatches) -> dict[int, Counts]:
        """What each micro-batch counts in the losses, by its number."""
        if self.losses is None:
            return {}
        aims, shares = parts.aims(self.losses.masks(batch.x))
        if self.table.asynchronous:  # each has an update of its own
            found = [self.losses.counts([aim], [1.0])[0] for aim in aims]
        else:
            found = self.losses.counts(aims, shares)
        return dict(zip(range(self.table.microbatches)[-len(found) :], found, strict=True))

    def _parts(self, batch: Batch) -> MicroBatches:
        if self.table.recurrent:
            return Stretches(batch, self.table.microbatches, self._opened)
        return MicroBatches(batch, self.table.microbatches)


class _UnderWay:
    """A batch in the pipeline: what this rank holds of it between two rows of the schedule."""

    def __init__(self, runner: Runner, parts: MicroBatches, counts: dict[int, Counts]) -> None:
        self._runner, self._parts, self._counts = runner, parts, counts
        self.passing = Passing(runner.links)
        self.loss: float | None = 0.0 if runner.last in runner.stages else None

    def carry_out(self, action: str, stage: int, number: int, peer: int) -> None:
        """One row of the schedule."""
        # A row of a message is between neighbours. What a stage has for others is sent with it, and
        # received with the last of the rows that lead there: it has been sent by then.
        if action == "receive":
            size = self._parts.size(number, max(stage, peer))
            self.passing.receive(stage, peer < stage, number, size)
        elif action == "send":
            self.passing.send(stage, peer > stage, number)
        elif action == "forward":
            self._forward(stage, number)
        elif action == "backward_weight":
            self._runner.stages[stage].backward_weight(number)
        else:
            own, gradient = self._runner.stages[stage], None
            if stage < self._runner.last:
                gradient = self.passing.take_back(stage, number)
            found = own.backward(number, gradient, action == "backward_input")
            self.passing.give_back(stage, number, found)

    def _forward(self, stage: int, number: int) -> None:
        x = self.passing.take(stage, number, listed(self._parts.input(number)))
        (y, weight), share = self._parts.targets(number), self._parts.share(number)
        targets = (y, (weight, self._counts.get(number)) if self._counts else weight)
        # Each micro-batch has an update of its own, and counts whole; or all have one together, and
        # it counts by its share of the batch.
        counts = 1.0 if self._runner.table.asynchronous else share
        own = self._runner.stages[stage]
        found = own.forward(number, x, counts, targets)
        self._runner.own_losses.take(own.own_loss, share / counts)
        if found is None:  # a stretch of time may have no answer yet
            return
        if stage < self._runner.last:
            self.passing.give(stage, number, found)
        else:
            loss: tf.Tensor = found
            self.loss = (self.loss or 0.0) + float(loss) * share / counts
