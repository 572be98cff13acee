"""Training of a model's modules with error gradients that arrive some iterations late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import tensorflow as tf

from labkit.model_parallel.losses import Losses, LossTargets
from labkit.model_parallel.stages.microbatches import Batch
from labkit.model_parallel.stages.passing import OwnLosses, Passing, Posted, StageMessages
from labkit.model_parallel.stages.runner import Record
from labkit.model_parallel.stages.stage import Stage, Targets, as_list, is_number


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
        record: Function of (action, module, iteration) that returns a context manager, which is
            entered around each computation and message.
        losses: `Losses` that the last module computes, see `Runner`.
    """

    def __init__(
        self, module: Stage, links: StageMessages, record: Record, losses: Losses | None = None
    ) -> None:
        self.module, self.links, self._record = module, links, record
        self.place, self._last = links.communicator.rank, links.communicator.size - 1
        self._losses = losses if self.place == self._last else None
        self.rows = 0
        self._rows: dict[int, int] = {}  # by iteration: number of rows whose gradients are pending
        self._iteration = 0
        self._passing = Passing(links)
        self._pending_sends: deque[Posted] = deque()  # pending send requests of each iteration
        self._own_losses = OwnLosses(links.communicator)

    def step(self, batch: Batch, update: Callable[[], None]) -> float | None:
        """Run one iteration; return the loss on the rank of the last module, elsewhere None.

        Args:
            batch: The batch, equal on all ranks of the replica.
            update: Function that is called when the gradients of an iteration are complete; the
                attribute `rows` is then the number of rows behind these gradients.
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
        # Module m receives a gradient from module s after s - m iterations. Sends that are older
        # than the number of modules minus 1 are therefore complete, and waiting for them does not
        # block.
        self._pending_sends.append(self._passing.posted)
        self._passing.posted = []
        if len(self._pending_sends) > self._last:
            self.links.communicator.finish(self._pending_sends.popleft())
        return self._own_losses.added_to(loss) if batch.rows else None

    def finish(self) -> None:
        """Receive the gradients that are still pending after training, and complete all sends."""
        for reader in range(self.place + 1, self._last + 1):
            # The module `reader` has run the backward pass of these iterations and has sent their
            # gradients.
            sent = range(self._iteration - (self._last - reader))
            for iteration in sent:
                if self._rows.get(iteration):  # this module has not received the gradients
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
