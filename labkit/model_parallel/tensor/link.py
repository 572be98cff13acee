"""What crosses between the slices of a layer, and how many bytes it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.schedules import boundaries


class Link:
    """The collectives of one layer, as operations with gradients.

                 forward        backward
        spread   identity       allreduce
        total    allreduce      identity
        join     allgather      own part

    Args:
        communicator: the slices of one replica.
        algorithm: see `Communicator.allreduce`.
        number: of the layer, for messages.

    Attributes:
        payload: bytes that this rank has handed over so far, by "forward" and "backward".
        wire: bytes that have left it.
    """

    def __init__(self, communicator: Communicator, algorithm: str, number: int) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator, self._algorithm, self._number = communicator, algorithm, number
        self.payload = {"forward": 0, "backward": 0}
        self.wire = {"forward": 0, "backward": 0}

    def own(self, length: int) -> slice:
        """This slice's part of so many units; parts differ by one at most."""
        edges = boundaries(length, self.size)
        return slice(int(edges[self.rank]), int(edges[self.rank + 1]))

    def spread(self, x: Any) -> Any:
        """Hand x to all slices; its gradient is the sum of theirs."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def identity(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            return tf.identity(x), lambda gradient: self._sum(gradient, "backward")

        return identity(x)

    def total(self, x: Any) -> Any:
        """The sum over the slices; each has its whole gradient."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def allreduce(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            return self._sum(x, "forward"), lambda gradient: gradient

        return allreduce(x)

    def join(self, x: Any, length: int) -> Any:
        """The slices' parts of the last axis (…, length), one behind the other."""
        own = self.own(length)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def allgather(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            return self._gather(x, length), lambda gradient: gradient[..., own]

        return allgather(x)

    def _sum(self, x: Any, way: str) -> Any:
        def call(value: np.ndarray) -> np.ndarray:
            buffer = np.array(value, order="C")
            self._communicator.allreduce(buffer, self._algorithm, self._place(way))
            return buffer

        return self._metered(call, x, way, x.shape)

    def _gather(self, x: Any, length: int) -> Any:
        edges = [int(edge) for edge in boundaries(length, self.size)]

        def call(value: np.ndarray) -> np.ndarray:
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            place = self._place("forward")
            found = self._communicator.gather_bytes(data, self._algorithm, place)
            parts = [
                part.view(value.dtype).reshape(*value.shape[:-1], stop - start)
                for part, (start, stop) in zip(found, pairwise(edges), strict=True)
            ]
            return np.concatenate(parts, axis=-1)

        return self._metered(call, x, "forward", [*x.shape[:-1], length])

    def _place(self, way: str) -> str:
        return f"the {way} pass of sliced layer {self._number}"

    def _metered(self, call: Callable[[np.ndarray], np.ndarray], x: Any, way: str, to: Any) -> Any:
        """The call as an operation. TensorFlow runs such operations in the order of the trace."""

        def counted(value: np.ndarray) -> np.ndarray:
            before = self._communicator.traffic.copy()
            result = call(value)
            spent = self._communicator.traffic.since(before)
            self.payload[way] += spent.payload_bytes
            self.wire[way] += spent.wire_bytes
            return result

        y = tf.numpy_function(counted, [x], x.dtype)
        y.set_shape(to)
        return y


@contextmanager
def uncounted(meters: Iterable[Any]) -> Iterator[None]:
    """What crosses in here is not counted by links, or by whatever else has payload and wire."""
    before = [(meter, dict(meter.payload), dict(meter.wire)) for meter in meters]
    try:
        yield
    finally:
        for meter, payload, wire in before:
            meter.payload, meter.wire = payload, wire
