"""A tensor that one says to another one alone: no mean, no collective, only bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.common.state import record
from labkit.compression.compressor import Compressor, State
from labkit.compression.payload import from_bytes, to_bytes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from labkit.compression.payload import Payload

Bytes = NDArray[np.uint8]
Vector = NDArray[Any]
_END = ("_compressor", "_size", "_shapes", "_edges")


class _End:
    """What both ends know: the compressor, and what of a vector is said together.

    Args:
        compressor: how it is said.
        shapes: of the tensors that lie in the vector, one behind the other.
    """

    def __init__(self, compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> None:
        self._compressor = compressor
        self._size = sum(map(prod, shapes))
        if not compressor.by_layer:
            shapes = [(self._size,)]
        self._shapes = [shape for shape in shapes if prod(shape)]
        self._edges = list(pairwise(np.cumsum([0, *map(prod, self._shapes)]).tolist()))

    def _start(self, number: int, seed: int) -> list[State]:
        return [
            self._compressor.start(shape, number, seed + n) for n, shape in enumerate(self._shapes)
        ]

    def _flat(self, tensors: Sequence[Any], dtype: DTypeLike) -> Vector:
        arrays = [np.asarray(tensor).reshape(-1) for tensor in tensors]
        return np.concatenate(arrays or [np.empty(0)]).astype(dtype, copy=False)


@record(*_END, "_states", "sent")
class Encoder(_End):
    r"""Says vectors of one kind to one listener, and keeps what the compressor keeps.

    Of nothing but zeros nothing is said; what waits, waits on. Where an element is infinite or NaN,
    all that is said is NaN.

    Args:
        compressor, shapes: see `_End`.
        number: whose random choices.
        seed: of these.

    Attributes:
        sent: what the last vector is understood as.
    """

    def __init__(
        self,
        compressor: Compressor,
        shapes: Sequence[tuple[int, ...]],
        number: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(compressor, shapes)
        self._states = self._start(number, seed)
        self.sent: Vector = np.zeros(self._size)

    def say(self, values: Vector) -> Bytes:
        """The bytes of a vector."""
        import tensorflow as tf

        if not values.any():
            self.sent = np.zeros_like(values)
            return np.empty(0, np.uint8)
        if not np.isfinite(np.dot(values, values)) and not np.isfinite(values).all():
            # A compressor says a part of the elements: one that is no number spoils them all.
            values = np.full_like(values, np.nan)
        told = []
        for number, (start, stop) in enumerate(self._edges):
            tensor = tf.constant(values[start:stop].reshape(self._shapes[number]))
            told.append(self._compressor.say(tensor, self._states[number]))
            self._states[number] = told[-1].state
        self.sent = self._flat([each.sent for each in told], values.dtype)
        return np.concatenate([to_bytes(each.payload) for each in told])

    @property
    def residual(self) -> Vector | None:
        """What waits to be said, or None for a compressor without memory."""
        found = [self._compressor.residual(state) for state in self._states]
        return None if any(each is None for each in found) else self._flat(found, self.sent.dtype)


@record(*_END, "_dtype", "_likes")
class Decoder(_End):
    """Understands what a speaker of the same kind says.

    Args:
        compressor, shapes: as the speaker's.
        dtype: of the vectors.
    """

    def __init__(
        self, compressor: Compressor, shapes: Sequence[tuple[int, ...]], dtype: DTypeLike
    ) -> None:
        super().__init__(compressor, shapes)
        self._dtype = np.dtype(dtype)
        self._likes: list[Payload] = []

    def hear(self, data: Bytes) -> Vector:
        """What the bytes say."""
        if not len(data):
            return np.zeros(self._size, self._dtype)
        at, found = 0, []
        for like in self._like():
            payload, at = from_bytes(data, like, at)
            found.append(self._compressor.understand(payload))
        return self._flat(found, self._dtype)

    def _like(self) -> list[Payload]:
        """Payloads whose parts have the right names and dtypes: those of zeros."""
        import tensorflow as tf

        if not self._likes:
            tensors = [tf.zeros(shape, self._dtype) for shape in self._shapes]
            pairs = zip(tensors, self._start(0, 0), strict=True)
            self._likes = [self._compressor.say(*pair).payload for pair in pairs]
        return self._likes
