"""Execution of one rank's actions in a pipeline schedule, with micro-batches of real data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.functional import Nest, attach_mask, mask_of
from labkit.model_parallel.losses import Counts, Losses, LossTargets
from labkit.model_parallel.stages.model_blocks import TensorSource
from labkit.model_parallel.stages.passing import Ends, OwnLosses, Passing, Posted, StageMessages
from labkit.model_parallel.stages.recurrent import is_open
from labkit.model_parallel.stages.stage import (
    Batch,
    MicroBatches,
    Passed,
    Rows,
    Stage,
    Targets,
    TimeSegments,
    as_list,
    call_with_masks,
    is_number,
)
from labkit.schedules.pipeline import ScheduleTable

Record: TypeAlias = Callable[[str, int, int], AbstractContextManager[None]]


class Runner:
    """Run training steps on the pipeline stages of one rank.

    Args:
        communicator: Communicator of the ranks of one replica, in stage order.
        table: The pipeline schedule.
        stages: Dict from stage number in the model to `Stage`, for the stages of this rank.
        inputs, outputs, takes: Tensors that the stages exchange, given as arguments of
            `StageMessages`.
        record: Function of (action, stage, micro-batch) that returns a context manager for each
            action of the schedule.
        losses: `Losses` of the model. If `losses` is given, the last stage receives pairs (sample
            weights, counts) instead of sample weights. If `losses` is None, micro-batches are
            weighted by rows, and the last stage receives sample weights.

    Attributes:
        rows: Number of batch rows from which the gradients of the latest update were computed. With
            an asynchronous schedule, `rows` counts one micro-batch; with a synchronous schedule,
            `rows` counts the whole batch.
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
            update: Function that is called when the weights of a stage may change. The argument of
                `update` is the number of the stage.
        """
        parts = self._parts(batch)
        in_flight = _BatchInFlight(self, parts, self._counts(batch, parts))
        for _, stage, action, number, peer in self._rows:
            # A stage skips an action on a micro-batch without data for the later stage. Of the
            # stage and its peer, the later stage has the greater number.
            if parts.reaches(number, max(stage, peer)):
                with self._record(action, stage, number):
                    in_flight.execute(action, stage, number, peer)
            # An asynchronous pipeline schedule updates the weights after each backward pass. An
            # asynchronous schedule never waits until the pipeline is empty.
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
        """Return a dict from micro-batch number to the weight of the micro-batch in each loss."""
        if self.losses is None:
            return {}
        targets, shares = parts.loss_targets(self.losses.masks(batch.x))
        # In an asynchronous schedule, each micro-batch has its own weight update. In an
        # asynchronous schedule, loss weights do not depend on other micro-batches.
        if self.table.asynchronous:
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
        # a distant stage is sent at the sender's schedule entry. A tensor from a distant stage is
        # received at its path's last entry.
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
        # In an asynchronous schedule, each micro-batch has its own weight update, so its losses
        # have weight 1. In a synchronous schedule, one update follows all micro-batches, whose
        # weights are their fractions of the batch.
        counts = 1.0 if self._runner.table.asynchronous else share
        module = self._runner.stages[stage]
        output = module.forward(number, x, counts, targets)
        self._runner.own_losses.take(module.own_loss, share / counts)
        if output is None:  # A stage returns None for a time segment that has no output.
            return
        if stage < self._runner.last:
            self.passing.store_outputs(stage, number, output)
        else:
            loss: tf.Tensor = output
            self.loss = (self.loss or 0.0) + float(loss) * share / counts


class Inference:
    """Run micro-batches forward through the stages of a replica.

        rank 0   F0 F1 F2 F3
        rank 1      F0 F1 F2 F3
        rank 2         F0 F1 F2 F3

    While the following stage processes one micro-batch, a stage already processes the next
    micro-batch. On each rank, one stage at a time processes a whole group of micro-batches. A group
    contains as many micro-batches as there are ranks. After the first stage, the rank's next stage
    processes the same group of micro-batches.

    Args:
        links: Messages to and from the stages on other ranks (`StageMessages`).
        models: Dict from stage number to the stage's model, for the stages of this rank.
        stages: Total number of stages on all ranks.
    """

    def __init__(
        self, links: StageMessages, models: Mapping[int, keras.Model], stages: int
    ) -> None:
        self._links, self._last = links, stages - 1
        self._ranks = links.communicator.size
        self._calls = {number: _compiled(models[number]) for number in sorted(models)}
        self._passing = Passing(links)
        self._posted: deque[Posted] = deque()

    def __call__(self, batches: Iterable[Passed]) -> Iterator[tuple[Nest | None, float]]:
        """Yield each micro-batch's output, and the loss that this rank's layers add for it.

        Args:
            batches: Inputs (rows, …) of the micro-batches, equal on all ranks, with at least one
                row each. If the model has several inputs, each element is a list of tensors.

        Yields: Pairs of the outputs (rows, …) and the added loss. The outputs are None except on
            the rank of the last stage.
        """
        remaining = iter(batches)
        # A group that has as many micro-batches as there are ranks keeps all ranks busy. When a
        # rank's first stage finishes a group, the rank's next stage can start.
        while group := list(islice(remaining, self._ranks)):
            yield from self._run_group([as_list(x) for x in group])
        while self._posted:
            self._links.communicator.finish(self._posted.popleft())

    def _run_group(self, group: list[list[Rows]]) -> list[tuple[Nest | None, float]]:
        outputs: list[Nest | None] = [None] * len(group)
        penalties = [0.0] * len(group)
        for stage, call in self._calls.items():
            for number, read in enumerate(group):
                self._passing.receive(stage, True, number, (len(read[0]),))
                y, penalty = call(as_list(self._passing.take(stage, number, read)))
                penalties[number] += float(penalty)
                if stage < self._last:
                    self._passing.store_outputs(stage, number, keras.tree.flatten(y))
                    self._post(stage, number)
                else:
                    outputs[number] = y
        return list(zip(outputs, penalties, strict=True))

    def _post(self, stage: int, number: int) -> None:
        self._passing.send(stage, True, number)
        self._posted.append(self._passing.posted)
        self._passing.posted = []
        # Pending sends occupy memory, so at most twice as many as ranks stay pending. A lower limit
        # of pending sends could cause a deadlock.
        if len(self._posted) > 2 * self._ranks:
            self._links.communicator.finish(self._posted.popleft())


def _compiled(model: keras.Model) -> Callable[[Sequence[Rows]], tuple[Nest, tf.Tensor]]:
    def forward(x: list[tf.Tensor]) -> tuple[Nest, list[tf.Tensor | None], tf.Tensor]:
        y = call_with_masks(model, x, training=False)
        penalties = [tf.reduce_sum(tf.cast(loss, keras.config.floatx())) for loss in model.losses]
        masks = [mask_of(output) for output in keras.tree.flatten(y)]
        return y, masks, tf.add_n(penalties) if penalties else tf.zeros((), keras.config.floatx())

    compiled = tf.function(forward, autograph=False, reduce_retracing=True)

    def call(x: Sequence[Rows]) -> tuple[Nest, tf.Tensor]:
        y, masks, penalty = compiled([tf.convert_to_tensor(value) for value in x])
        for output, mask in zip(keras.tree.flatten(y), masks, strict=True):
            # A compiled TensorFlow function returns tensors without Keras masks, so the masks are
            # attached again.
            attach_mask(output, mask)
        return y, penalty

    return call


class Delayed:
    """Training of one module per rank: modules run forward in sequence, but backward in parallel.

        K = 3, iteration    0   1     2     3
        module 1            F0  F1    F2B0  F3B1
        module 2            F0  F1B0  F2B1  F3B2
        module 3            F0B0  F1B1  F2B2  F3B3

    Args:
        module: The module of this rank; it stores an iteration's tensors until the iteration's
            gradient arrives.
        links: Messages to and from the modules on other ranks (`StageMessages`), with one module
            per rank.
        record: Function of (action, module, iteration) that returns a context manager for each
            computation and each message.
        losses: `Losses` that the last module computes, see `Runner`.
    """

    def __init__(
        self, module: Stage, links: StageMessages, record: Record, losses: Losses | None = None
    ) -> None:
        self.module, self.links, self._record = module, links, record
        self.place, self._last = links.communicator.rank, links.communicator.size - 1
        self._losses = losses if self.place == self._last else None
        self.rows = 0
        # The dict `_rows` maps an iteration to its number of rows, until its gradients are
        # computed.
        self._rows: dict[int, int] = {}
        self._iteration = 0
        self._passing = Passing(links)
        # The queue `_pending_sends` contains the pending send requests of each iteration.
        self._pending_sends: deque[Posted] = deque()
        self._own_losses = OwnLosses(links.communicator)

    def step(self, batch: Batch, update: Callable[[], None]) -> float | None:
        """Run one iteration; return the loss on the rank of the last module, elsewhere None.

        Args:
            batch: The batch, equal on all ranks of the replica.
            update: Function that is called when an iteration's gradients are complete. During the
                call, `rows` is the number of rows behind the gradients.
        """
        self._rows[self._iteration] = batch.rows
        weight = batch.weight
        if self._losses is not None:
            targets = LossTargets(batch.y, weight, self._losses.masks(batch.x))
            weight = weight, self._losses.counts([targets], [1.0])[0]
        loss = self._forward(batch, (batch.y, weight)) if batch.rows else None
        backward_iteration = self._iteration - (self._last - self.place)
        if backward_iteration >= 0:
            self.rows = self._rows.pop(backward_iteration)
            if self.rows:  # iterations without rows have no gradients
                self._backward(backward_iteration)
            update()
        self._iteration += 1
        # Module m receives a gradient from module s after s - m iterations. With M modules, an
        # iteration's sends are complete after M - 1 more iterations. The call of `finish` does not
        # block, because the sends are complete.
        self._pending_sends.append(self._passing.posted)
        self._passing.posted = []
        if len(self._pending_sends) > self._last:
            self.links.communicator.finish(self._pending_sends.popleft())
        return self._own_losses.added_to(loss) if batch.rows else None

    def finish(self) -> None:
        """Receive the gradients that are still pending after training, and complete all sends."""
        for reader in range(self.place + 1, self._last + 1):
            # The rank `reader` has finished the backward passes of the iterations in `sent`. The
            # rank `reader` has also sent the gradients of the iterations.
            sent = range(self._iteration - (self._last - reader))
            for iteration in sent:
                # A row count above 0 shows that the gradients of the iteration are still pending.
                if self._rows.get(iteration):
                    self._receive_gradients(reader, self._rows[iteration])
        while self._pending_sends:
            self.links.communicator.finish(self._pending_sends.popleft())

    def _receive_gradients(self, reader: int, rows: int) -> None:
        for place, spec in enumerate(self.links.outputs[self.place]):
            readers = [stage for stage, _ in self.links.readers(self.place, place)]
            if is_number(spec) and reader in readers:
                self.links.receive(spec, self.place, reader, (rows,))

    def _forward(self, batch: Batch, targets: Targets) -> float | None:
        place, iteration = self.place, self._iteration
        if place > 0:
            with self._record("receive", place, iteration):
                self._passing.receive(place, True, iteration, (batch.rows,))
        with self._record("forward", place, iteration):
            x = self._passing.take(place, iteration, as_list(batch.x))
            y: tf.Tensor = self.module.forward(iteration, x, 1.0, targets)
        self._own_losses.take(self.module.own_loss)
        if place == self._last:
            return float(y)
        with self._record("send", place, iteration):
            self._passing.store_outputs(place, iteration, y)
            self._passing.send(place, True, iteration)
        return None

    def _backward(self, iteration: int) -> None:
        place, gradient = self.place, None
        if place < self._last:
            with self._record("receive", place, iteration):
                self._passing.receive(place, False, iteration, (self.rows,))
                gradient = self._passing.pop_gradients(place, iteration)
        with self._record("backward", place, iteration):
            input_gradient = self.module.backward(iteration, gradient)
        self._passing.store_gradients(place, iteration, input_gradient)
        if place > 0:
            with self._record("send", place, iteration):
                self._passing.send(place, False, iteration)
