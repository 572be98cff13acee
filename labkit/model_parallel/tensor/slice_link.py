"""The messages between the ranks that have the slices of one layer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.meter import Batch, Meter, Way, WithGradient
from labkit.schedules import boundaries


class Link(Meter):
    """Collectives between the slices of a layer, as TensorFlow operations with gradients.

                 forward        backward
        spread   identity       allreduce
        total    allreduce      identity
        join     allgather      local part

    Args:
        communicator: Communicator of the ranks that have the slices of one replica.
        algorithm: Allreduce algorithm, see `Communicator.allreduce`.
        number: Number of the layer, by which error messages name its collectives.
    """

    def __init__(self, communicator: Communicator, algorithm: str, number: int) -> None:
        super().__init__(communicator)
        self.rank, self.size = communicator.rank, communicator.size
        self._algorithm, self._number = algorithm, number

    def local_range(self, length: int) -> slice:
        """Return this slice's range among `length` units; slice sizes differ by at most one."""
        edges = boundaries(length, self.size)
        return slice(int(edges[self.rank]), int(edges[self.rank + 1]))

    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """Return x, which all slices read; the gradient of x is summed over all slices."""

        def identity(x: tf.Tensor) -> WithGradient:
            return tf.identity(x), lambda gradient: self._sum(gradient, "backward")

        return tf.custom_gradient(identity)(x)

    def total(self, x: tf.Tensor) -> tf.Tensor:
        """Return the sum of x over all slices; each slice receives the sum's gradient unchanged."""

        def allreduce(x: tf.Tensor) -> WithGradient:
            return self._sum(x, "forward"), lambda gradient: gradient

        return tf.custom_gradient(allreduce)(x)

    def join(self, x: tf.Tensor, length: int) -> tf.Tensor:
        """Concatenate the tensors of all slices along the last axis, to the shape (…, length)."""
        local = self.local_range(length)

        def allgather(x: tf.Tensor) -> WithGradient:
            return self._gather(x, length), lambda gradient: gradient[..., local]

        return tf.custom_gradient(allgather)(x)

    def _sum(self, x: tf.Tensor, way: Way) -> tf.Tensor:
        def call(value: Batch) -> Batch:
            buffer = np.array(value, order="C")
            self.communicator.allreduce(buffer, self._algorithm, self._place(way))
            return buffer

        return self.run_counted(call, x, way, x.shape)

    def _gather(self, x: tf.Tensor, length: int) -> tf.Tensor:
        edges = [int(edge) for edge in boundaries(length, self.size)]

        def call(value: Batch) -> Batch:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            place = self._place("forward")
            chunks = self.communicator.gather_bytes(data, self._algorithm, place)
            parts = [
                part.view(value.dtype).reshape(*value.shape[:-1], stop - start)
                for part, (start, stop) in zip(chunks, pairwise(edges), strict=True)
            ]
            return np.concatenate(parts, axis=-1)

        return self.run_counted(call, x, "forward", [*x.shape[:-1], length])

    def _place(self, way: Way) -> str:
        return f"the {way} pass of sliced layer {self._number}"
