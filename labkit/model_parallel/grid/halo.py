"""The halo exchange of one layer between machines, as an operation with a gradient."""

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
    """The exchange of a layer's outputs that gives each machine the values that it reads.

    In the forward pass, a machine sends its values to each machine that reads them, in one message
    per receiver. A machine inserts the received values around the values that it owns. In the
    backward pass, the gradients of the exchanged values return to the owners, which add them in the
    order of machine numbers. All machines send before any machine waits, so no deadlock can arise.

    Args:
        communicator: Communicator of the machines (ranks) of one replica.
        border: Index ranges of the values that this machine sends and receives.
        number: Index of the layer that reads the values, in the order of the model's layers.
    """

    def __init__(self, communicator: Communicator, border: Border, number: int) -> None:
        super().__init__(communicator)
        self._border, self._number = border, number

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """Return the values that this machine reads, given the tensor x of values that it owns.

        The argument and the result have the shape (batch, rows, columns, channels).
        """
        border = self._border

        def exchange(x: tf.Tensor) -> WithGradient:
            rows = x.shape[0]
            y = self.run_counted(self._forward, x, "forward", [rows, *border.read_shape])
            return y, lambda gradient: self.run_counted(
                self._backward, gradient, "backward", [rows, *border.owned_shape]
            )

        return tf.custom_gradient(exchange)(x)

    def _forward(self, x: Batch) -> Batch:
        requests = self._send(x, self._border.out, 0)
        values = self._border.inside(x)
        for source, index in self._border.come:
            values[index] = self._receive(values[index], source, 0)
        self.communicator.finish(requests)
        return values

    def _backward(self, gradient: Batch) -> Batch:
        requests = self._send(gradient, self._border.come, 1)
        result = self._border.back(gradient)
        for source, index in self._border.out:
            result[index] += self._receive(result[index], source, 1)
        self.communicator.finish(requests)
        return result

    def _send(self, x: Batch, places: Sequence[tuple[int, Place]], way: int) -> list[MPI.Request]:
        tag = 2 * self._number + way
        requests: list[MPI.Request] = []
        for machine, place in places:
            requests += self.communicator.post(np.ascontiguousarray(x[place]), machine, tag)
        return requests

    def _receive(self, like: Batch, source: int, way: int) -> Batch:
        data = np.empty(like.shape, like.dtype)
        self.communicator.recv(data, source, 2 * self._number + way)
        return data
