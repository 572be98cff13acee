"""What a rank hands over, and as bytes: what a file of it would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

Tensor: TypeAlias = "tf.Tensor"
Payload: TypeAlias = "Mapping[str, tf.Tensor | np.ndarray]"  # parts, each of one dimension

COUNT = np.dtype("<i4")  # before each part: how many elements it has


def to_bytes(payload: Payload) -> np.ndarray:
    """The parts in their order, each behind its number of elements; uint8 (nbytes,)."""
    pieces: list[np.ndarray] = []
    for part in payload.values():
        array = np.asarray(part)
        # With its length: ranks may send different numbers of elements.
        pieces += [np.array([array.size], COUNT).view(np.uint8), array.view(np.uint8)]
    return np.concatenate(pieces)


def from_bytes(
    data: np.ndarray, like: Payload, start: int = 0
) -> tuple[dict[str, np.ndarray], int]:
    """The payload that begins at a byte, and the byte behind it.

    Args:
        data: uint8.
        like: another payload, whose parts have the same names and dtypes.
        start: where it begins.
    """
    found: dict[str, np.ndarray] = {}
    for name, dtype in _dtypes(like).items():
        count = int(data[start : start + COUNT.itemsize].copy().view(COUNT)[0])
        start += COUNT.itemsize
        stop = start + count * dtype.itemsize
        found[name] = data[start:stop].copy().view(dtype)  # aligned, whatever stands before it
        start = stop
    return found, start


def nbytes(payload: Payload) -> int:
    """What a payload takes on the wire, and in a file."""
    # As `to_bytes` writes it, counts included, but without writing.
    return sum(COUNT.itemsize + np.asarray(part).nbytes for part in payload.values())


def _dtypes(payload: Payload) -> Mapping[str, np.dtype]:
    return {name: np.asarray(part).dtype for name, part in payload.items()}
