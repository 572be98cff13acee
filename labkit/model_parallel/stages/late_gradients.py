"""Training steps of a module whose error gradients come some iterations late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import tensorflow as tf

from labkit.model_parallel.losses import Aims, Losses
from labkit.model_parallel.stages.microbatches import Batch
from labkit.model_parallel.stages.passing import Links, OwnLosses, Passing, Posted
from labkit.model_parallel.stages.runner import Record
from labkit.model_parallel.stages.stage import Stage, Targets, is_number, listed


class Delayed:
    """Runs one rank's module: forward in sequence, backward beside the others.

        K = 3, iteration    0   1     2     3
        module 1            F0  F1    F2B0  F3B1
        module 2            F0  F1B0  F2B1  F3B2
        module 3            F0B0  F1B1  F2B2  F3B3

    Args:
        module: this rank's; it keeps what its backward needs, of as many iterations as it is late.
        links: to the modules before and behind it, one a rank.
        record: of (action, module, iteration), stands around each computation and message.
        losses: as of `Runner`.
    """

    def __init__(
        self, module: Stage, links: Links, record: Record, losses: Losses | None = None
    ) -> None:
        self.module, self.links, self._record = module, links, record
        self.place, self._last = links.communicator.rank, links.communicator.size - 1
        self._losses = losses if self.place == self._last else None
        self.rows = 0
        self._rows: dict[int, int] = {}  # of the iterations whose gradients are still to come
        self._iteration = 0
        self._passing = Passing(links)
        self._under_way: deque[Posted] = deque()  # by iteration
        self._own_losses = OwnLosses(links.communicator)

    def step(self, batch: Batch, update: Callable[[], None]) -> float | None:
        """One iteration; the loss on the rank of the last module, else None.

        Args:
            batch: the same on all ranks of the replica.
            update: called when the gradients of an iteration are there, of `rows` rows.
        """
        self._rows[self._iteration] = batch.rows
        weight = batch.weight
        if self._losses is not None:
            aims = Aims(batch.y, weight, self._losses.masks(batch.x))
            weight = weight, self._losses.counts([aims], [1.0])[0]
        loss = self._forward(batch, (batch.y, weight)) if batch.rows else None
        late = self._iteration - (self._last - self.place)
        if late >= 0:
            self.rows = self._rows.pop(late)
            if self.rows:  # an iteration without rows has sent nothing
                self._backward(late)
            update()
        self._iteration += 1
        # What was sent so many iterations ago has been received by now: a gradient by the first
        # module as many later as there are modules between.
        self._under_way.append(self._passing.posted)
        self._passing.posted = []
        if len(self._under_way) > self._last:
            self.links.communicator.finish(self._under_way.popleft())
        return self._own_losses.added_to(loss) if batch.rows else None

    def finish(self) -> None:
        """Receive what is still on its way; it belongs to iterations that nobody goes on with."""
        for reader in range(self.place + 1, self._last + 1):
            sent = range(self._iteration - (self._last - reader))  # gone back through the reader
            for iteration in sent:
                if self._rows.get(iteration):  # and not through this module
                    self._drain(reader, self._rows[iteration])
        while self._under_way:
            self.links.communicator.finish(self._under_way.popleft())

    def _drain(self, reader: int, rows: int) -> None:
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
            x = self._passing.take(place, iteration, listed(batch.x))
            y: tf.Tensor = self.module.forward(iteration, x, 1.0, targets)
        self._own_losses.take(self.module.own_loss)
        if place == self._last:
            return float(y)
        with self._record("send", place, iteration):
            self._passing.give(place, iteration, y)
            self._passing.send(place, True, iteration)
        return None

    def _backward(self, iteration: int) -> None:
        place, gradient = self.place, None
        if place < self._last:
            with self._record("receive", place, iteration):
                self._passing.receive(place, False, iteration, (self.rows,))
                gradient = self._passing.take_back(place, iteration)
        with self._record("backward", place, iteration):
            found = self.module.backward(iteration, gradient)
        self._passing.give_back(place, iteration, found)
        if place > 0:
            with self._record("send", place, iteration):
                self._passing.send(place, False, iteration)
