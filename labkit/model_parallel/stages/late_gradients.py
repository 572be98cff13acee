"""Training steps of a module whose error gradients come some iterations late."""

from __future__ import annotations

from collections.abc import Callable

from labkit.model_parallel.stages.microbatches import Batch
from labkit.model_parallel.stages.passing import Links, OwnLosses, Posted
from labkit.model_parallel.stages.runner import Record
from labkit.model_parallel.stages.stage import Stage


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
    """

    def __init__(self, module: Stage, links: Links, record: Record) -> None:
        self.module, self.links, self._record = module, links, record
        self.place, self._last = links.communicator.rank, links.communicator.size - 1
        self.rows = 0
        self._rows: dict[int, int] = {}  # of the iterations whose gradients are still to come
        self._iteration = 0
        self._posted: Posted = []
        self._own_losses = OwnLosses(links.communicator)

    def step(self, batch: Batch, update: Callable[[], None]) -> float | None:
        """One iteration; the loss on the rank of the last module, else None.

        Args:
            batch: the same on all ranks of the replica.
            update: called when the gradients of an iteration are there, of `rows` rows.
        """
        # What was sent in the last iteration is waited for at the end of this one: by then the
        # neighbours, which compute meanwhile, have received it.
        before, self._posted = self._posted, []
        self._rows[self._iteration] = len(batch.x)
        loss = self._forward(batch) if len(batch.x) else None
        late = self._iteration - (self._last - self.place)
        if late >= 0:
            self.rows = self._rows.pop(late)
            if self.rows:  # an iteration without rows has sent nothing
                self._backward(late)
            update()
        self._iteration += 1
        self.links.communicator.finish(before)
        return self._own_losses.added_to(loss) if len(batch.x) else None

    def finish(self) -> None:
        """Receive what is still on its way; it belongs to iterations that nobody goes on with."""
        late = self._iteration - (self._last - self.place)
        if self.place < self._last and self._rows.get(late):
            self.links.receive(self.place, self.place + 1, self._rows[late])
        self.links.communicator.finish(self._posted)

    def _forward(self, batch: Batch) -> float | None:
        x = batch.x
        if self.place > 0:
            with self._record("receive", self.place, self._iteration):
                x = self.links.receive(self.place, self.place - 1, len(x))
        with self._record("forward", self.place, self._iteration):
            y = self.module.forward(self._iteration, x, 1.0, (batch.y, batch.weight))
        self._own_losses.take(self.module.own_loss)
        if self.place == self._last:
            return float(y)
        with self._record("send", self.place, self._iteration):
            self._posted += self.links.send(y, self.place, self.place + 1)
        return None

    def _backward(self, iteration: int) -> None:
        gradient = None
        if self.place < self._last:
            with self._record("receive", self.place, iteration):
                gradient = self.links.receive(self.place, self.place + 1, self.rows)
        with self._record("backward", self.place, iteration):
            found = self.module.backward(iteration, gradient)
        if self.place > 0:
            with self._record("send", self.place, iteration):
                self._posted += self.links.send(found, self.place, self.place - 1)
