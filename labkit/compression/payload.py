"""Payloads: the named vectors (parts) that a rank sends, and their serialization to bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

Tensor: TypeAlias = "tf.Tensor"
Payload: TypeAlias = "Mapping[str, tf.Tensor | np.ndarray]"  # named vectors

COUNT = np.dtype("<i4")  # type of the element count that precedes each part


def to_bytes(payload: Payload) -> np.ndarray:
    """Serialize the parts in order, each after its element count; return uint8 (nbytes,)."""
    pieces: list[np.ndarray] = []
    for part in payload.values():
        array = np.asarray(part)
        # The element count is stored, because ranks may send different numbers of elements.
        pieces += [np.array([array.size], COUNT).view(np.uint8), array.view(np.uint8)]
    return np.concatenate(pieces)


def from_bytes(
    data: np.ndarray, like: Payload, start: int = 0
) -> tuple[dict[str, np.ndarray], int]:
    """Return the payload that starts at a byte offset, and the byte offset of its end.

    Args:
        data: The bytes, uint8.
        like: A payload whose parts have the same names and dtypes as those in the bytes.
        start: The byte offset at which the payload starts.
    """
    parts: dict[str, np.ndarray] = {}
    for name, dtype in _dtypes(like).items():
        count = int(data[start : start + COUNT.itemsize].copy().view(COUNT)[0])
        start += COUNT.itemsize
        stop = start + count * dtype.itemsize
        parts[name] = data[start:stop].copy().view(dtype)  # the copy is aligned for its dtype
        start = stop
    return parts, start


def nbytes(payload: Payload) -> int:
    """Return the size of a payload in bytes, including the element counts."""
    return sum(COUNT.itemsize + np.asarray(part).nbytes for part in payload.values())


def _dtypes(payload: Payload) -> Mapping[str, np.dtype]:
    return {name: np.asarray(part).dtype for name, part in payload.items()}
