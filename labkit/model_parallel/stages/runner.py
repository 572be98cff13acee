"""Execution of one rank's actions in a pipeline schedule, with micro-batches of real data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.losses import Counts, Losses
from labkit.model_parallel.stages.microbatches import Batch, MicroBatches, TimeSegments
from labkit.model_parallel.stages.model_blocks import TensorSource
from labkit.model_parallel.stages.open_time import is_open
from labkit.model_parallel.stages.passing import Ends, OwnLosses, Passing, StageMessages
from labkit.model_parallel.stages.stage import Stage, as_list
from labkit.schedules.pipeline import ScheduleTable

Record: TypeAlias = Callable[[str, int, int], AbstractContextManager[None]]


class Runner:
    """Run training steps on the pipeline stages of one rank.

    Args:
        communicator: Communicator of the ranks of one replica, in stage order.
        table: The pipeline schedule.
        stages: Stages of this rank, by stage number in the model.
        inputs, outputs, takes: Tensors between the stages, same arguments as those of
            `StageMessages`.
        record: Function of (action, stage, micro-batch) that returns a context manager, which is
            entered around each action of the schedule.
        losses: `Losses` of the model. If they are given, the last stage receives pairs (sample
            weights, counts) instead of sample weights. If `losses` is None, micro-batches are
            weighted by rows, and the last stage receives sample weights.

    Attributes:
        rows: Number of batch rows behind the gradients at the latest `update`. In an asynchronous
            schedule, these are the rows of one micro-batch; otherwise, those of the whole batch.
    """

    def __init__(
        self,
        communicator: Communicator,
        table: ScheduleTable,
        stages: Mapping[int, Stage],
        inputs: Ends,
        outputs: Ends,
        record: Record,
        losses: Losses | None = None,
        takes: Sequence[Sequence[TensorSource]] | None = None,
    ) -> None:
        self.losses = losses if table.stages - 1 in stages else None
        self.communicator, self.table, self.stages = communicator, table, dict(stages)
        self.links, self._record = StageMessages(communicator, inputs, outputs, takes), record
        self._rows = table.of_rank(communicator.rank).rows()
        self.last = table.stages - 1
        self.rows = 0
        self.own_losses = OwnLosses(communicator)
        ends = [*self.links.inputs, self.links.outputs[-1]]
        self._opened = [any(map(is_open, tensors)) for tensors in ends]

    def step(self, batch: Batch, update: Callable[[int], None]) -> float | None:
        """Train with one batch; return the loss on the rank of the last stage, None on other ranks.

        Args:
            batch: The batch, equal on all ranks of the replica.
            update: Function that is called with the number of a stage when the weights of this
                stage may change.
        """
        parts = self._parts(batch)
        in_flight = _BatchInFlight(self, parts, self._counts(batch, parts))
        for _, stage, action, number, peer in self._rows:
            # Whether a message is sent depends on the stage that comes later in the model. If the
            # micro-batch has no data for that stage (for example no rows), no rank computes or
            # sends anything.
            if parts.reaches(number, max(stage, peer)):
                with self._record(action, stage, number):
                    in_flight.execute(action, stage, number, peer)
            # An asynchronous schedule never waits until the pipeline is empty; an update follows
            # each backward pass.
            if self.table.asynchronous and action == "backward":
                self.rows = parts.rows(number)
                update(stage)
        # Pending sends are completed only at the end of the step. If two ranks waited earlier until
        # their sends to each other were complete, they could deadlock.
        self.communicator.finish(in_flight.passing.posted)
        if not self.table.asynchronous:
            self.rows = batch.rows
            for stage in self.stages:
                update(stage)
        return self.own_losses.added_to(in_flight.loss) if batch.rows else None

    def _counts(self, batch: Batch, parts: MicroBatches) -> dict[int, Counts]:
        """Return the weight of each micro-batch in the losses, by micro-batch number."""
        if self.losses is None:
            return {}
        targets, shares = parts.loss_targets(self.losses.masks(batch.x))
        if self.table.asynchronous:  # each micro-batch has its own update
            counts = [self.losses.counts([target], [1.0])[0] for target in targets]
        else:
            counts = self.losses.counts(targets, shares)
        return dict(zip(range(self.table.microbatches)[-len(counts) :], counts, strict=True))

    def _parts(self, batch: Batch) -> MicroBatches:
        if self.table.recurrent:
            return TimeSegments(batch, self.table.microbatches, self._opened)
        return MicroBatches(batch, self.table.microbatches)


class _BatchInFlight:
    """A batch in the pipeline, with the tensors that this rank stores between its actions."""

    def __init__(self, runner: Runner, parts: MicroBatches, counts: dict[int, Counts]) -> None:
        self._runner, self._parts, self._counts = runner, parts, counts
        self.passing = Passing(runner.links)
        self.loss: float | None = 0.0 if runner.last in runner.stages else None

    def execute(self, action: str, stage: int, number: int, peer: int) -> None:
        """Execute one action (row) of the pipeline schedule."""
        # The schedule contains entries only for messages between neighbouring stages. A tensor for
        # a stage farther away is sent at the sender's entry, and received at the last entry on its
        # path.
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
            module, gradient = self._runner.stages[stage], None
            if stage < self._runner.last:
                gradient = self.passing.pop_gradients(stage, number)
            input_gradient = module.backward(number, gradient, action == "backward_input")
            self.passing.store_gradients(stage, number, input_gradient)

    def _forward(self, stage: int, number: int) -> None:
        x = self.passing.take(stage, number, as_list(self._parts.input(number)))
        (y, weight), share = self._parts.targets(number), self._parts.share(number)
        targets = (y, (weight, self._counts.get(number)) if self._counts else weight)
        # In an asynchronous schedule, an update follows each micro-batch, so each has weight 1. In
        # a synchronous schedule, one update follows all micro-batches, whose weights are their
        # fractions of the batch.
        counts = 1.0 if self._runner.table.asynchronous else share
        module = self._runner.stages[stage]
        output = module.forward(number, x, counts, targets)
        self._runner.own_losses.take(module.own_loss, share / counts)
        if output is None:  # some time segments have no output
            return
        if stage < self._runner.last:
            self.passing.store_outputs(stage, number, output)
        else:
            loss: tf.Tensor = output
            self.loss = (self.loss or 0.0) + float(loss) * share / counts
