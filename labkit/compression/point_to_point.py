"""Compression of vectors to bytes that are sent to a single receiver, without collectives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.common.state import record
from labkit.compression.compressor import Compressor, State, from_bytes, to_bytes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from labkit.compression.compressor import Payload

Bytes = NDArray[np.uint8]
Vector = NDArray[Any]
_BASE_FIELDS = ("_compressor", "_size", "_shapes", "_edges")


class _Codec:
    """The base class of encoder and decoder, with the compressor and the shapes of the tensors.

    Args:
        compressor: The compressor of the tensors; it has the same fields in encoder and decoder.
        shapes: The shapes of the tensors that form the flat vector, in order.
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


@record(*_BASE_FIELDS, "_states", "sent")
class Encoder(_Codec):
    """Encodes a sequence of vectors for one receiver, and stores the compressor's state.

    A vector of zeros is encoded as an empty array. If an element is infinite or NaN, all encoded
    elements are NaN.

    Args:
        compressor, shapes: The compressor and the shapes of the tensors in a vector.
        number: The number of the sender; senders with different numbers make different random
            choices.
        seed: The seed of the random choices.

    Attributes:
        sent: The last encoded vector, as the receiver decodes it.
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

    def encode(self, values: Vector) -> Bytes:
        """Return the encoded bytes of a vector."""
        import tensorflow as tf

        if not values.any():
            self.sent = np.zeros_like(values)
            return np.empty(0, np.uint8)
        if not np.isfinite(np.dot(values, values)) and not np.isfinite(values).all():
            # One infinite or NaN element turns the whole vector into NaN. A compressor might
            # otherwise omit the bad element.
            values = np.full_like(values, np.nan)
        messages = []
        for number, (start, stop) in enumerate(self._edges):
            tensor = tf.constant(values[start:stop].reshape(self._shapes[number]))
            messages.append(self._compressor.compress(tensor, self._states[number]))
            self._states[number] = messages[-1].state
        self.sent = self._flat([message.sent for message in messages], values.dtype)
        return np.concatenate([to_bytes(message.payload) for message in messages])

    @property
    def residual(self) -> Vector | None:
        """The unsent part of all vectors so far; None for a compressor without memory."""
        residuals = [self._compressor.residual(state) for state in self._states]
        return (
            None
            if any(residual is None for residual in residuals)
            else self._flat(residuals, self.sent.dtype)
        )


@record(*_BASE_FIELDS, "_dtype", "_likes")
class Decoder(_Codec):
    """Decodes the vectors of an encoder with the same compressor and shapes.

    Args:
        compressor, shapes: The compressor and the shapes of tensors, the same as those of the
            encoder.
        dtype: The dtype of the decoded vectors.
    """

    def __init__(
        self, compressor: Compressor, shapes: Sequence[tuple[int, ...]], dtype: DTypeLike
    ) -> None:
        super().__init__(compressor, shapes)
        self._dtype = np.dtype(dtype)
        self._likes: list[Payload] = []

    def decode(self, data: Bytes) -> Vector:
        """Decode the bytes of one encoded vector, and return the vector."""
        if not len(data):
            return np.zeros(self._size, self._dtype)
        offset, tensors = 0, []
        for template in self._templates():
            payload, offset = from_bytes(data, template, offset)
            tensors.append(self._compressor.decompress(payload))
        return self._flat(tensors, self._dtype)

    def _templates(self) -> list[Payload]:
        """Return payloads of zero tensors, which show the names and dtypes of a payload's parts."""
        import tensorflow as tf

        if not self._likes:
            tensors = [tf.zeros(shape, self._dtype) for shape in self._shapes]
            pairs = zip(tensors, self._start(0, 0), strict=True)
            self._likes = [self._compressor.compress(*pair).payload for pair in pairs]
        return self._likes
