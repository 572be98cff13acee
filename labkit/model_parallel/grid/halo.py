"""The values of one layer that cross between machines, as an operation with a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.grid.border import Border, Place
from labkit.model_parallel.meter import Batch, Meter, WithGradient

if TYPE_CHECKING:
    from mpi4py import MPI


class Halo(Meter):
    """From what each machine holds of a layer to what each reads of it.

    Forward, a machine sends each other one the values that this one reads, in one message, and
    puts what it receives around its own. Backward the gradients of the same values return, and
    add up in order of machines. All send before any waits, so that none waits in a circle.

    Args:
        communicator: the machines of one replica.
        border: of this machine, before the layer.
        number: the reading layer's place among all.
    """

    def __init__(self, communicator: Communicator, border: Border, number: int) -> None:
        super().__init__(communicator)
        self._border, self._number = border, number

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """What this machine reads, of what it holds; both (batch, rows, columns, channels)."""
        border = self._border

        def exchange(x: tf.Tensor) -> WithGradient:
            rows = x.shape[0]
            y = self.metered(self._forward, x, "forward", [rows, *border.whole])
            return y, lambda gradient: self.metered(
                self._backward, gradient, "backward", [rows, *border.own]
            )

        return tf.custom_gradient(exchange)(x)

    def _forward(self, x: Batch) -> Batch:
        posted = self._send(x, self._border.out, 0)
        found = self._border.inside(x)
        for source, there in self._border.come:
            found[there] = self._receive(found[there], source, 0)
        self.communicator.finish(posted)
        return found

    def _backward(self, gradient: Batch) -> Batch:
        posted = self._send(gradient, self._border.come, 1)
        found = self._border.back(gradient)
        for source, mine in self._border.out:
            found[mine] += self._receive(found[mine], source, 1)
        self.communicator.finish(posted)
        return found

    def _send(self, x: Batch, places: Sequence[tuple[int, Place]], way: int) -> list[MPI.Request]:
        tag = 2 * self._number + way
        posted: list[MPI.Request] = []
        for machine, place in places:
            posted += self.communicator.post(np.ascontiguousarray(x[place]), machine, tag)
        return posted

    def _receive(self, like: Batch, source: int, way: int) -> Batch:
        data = np.empty(like.shape, like.dtype)
        self.communicator.recv(data, source, 2 * self._number + way)
        return data
