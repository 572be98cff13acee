"""Gradients into their bucket: what is copied where, laid out once for all steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.exchange.bucket import Bucket

Piece = tuple[int, np.ndarray]  # offset in the bucket, values


class Packing:
    """Copies the gradients of a bucket to their places in its memory.

    Args:
        bucket: what lies where.
        memory: of the bucket, (length,).
        stays: elements that this rank adds up itself. They are not copied but handed on as they
            are, while the step stands still for the sum.
    """

    def __init__(self, bucket: Bucket, memory: np.ndarray, stays: slice) -> None:
        self._copies: list[tuple[int, slice, np.ndarray]] = []  # number, elements, place
        self._kept: list[tuple[int, slice, int]] = []  # number, elements, offset
        for number, slot in enumerate(bucket.slots):
            first = slot.offset - bucket.start
            begin, end = np.clip((stays.start - first, stays.stop - first), 0, slot.length).tolist()
            for start, stop in ((0, begin), (end, slot.length)):
                if start < stop:
                    place = memory[first + start : first + stop]
                    elements = slice(slot.start + start, slot.start + stop)
                    self._copies.append((number, elements, place))
            if begin < end:
                elements = slice(slot.start + begin, slot.start + end)
                self._kept.append((number, elements, first + begin))

    def __call__(self, arrays: Sequence[np.ndarray], counts: bool) -> list[Piece] | None:
        """Copy, and return what stays where it is; None where nothing does.

        Args:
            arrays: the gradients of the bucket's slots, whole.
            counts: whether there are samples behind them; without, even one that is not a number
                counts 0.
        """
        flat = [array.reshape(-1) for array in arrays]
        for number, elements, place in self._copies:
            place[...] = flat[number][elements] if counts else 0
        kept = [(offset, flat[number][elements]) for number, elements, offset in self._kept]
        if not counts:
            kept = [(offset, np.zeros_like(values)) for offset, values in kept]
        return kept or None
