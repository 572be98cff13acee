"""Flat buffers for gradients and their means, and the copying of gradients into these buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.communicator import Communicator
from labkit.exchange.bucket import Bucket, Slot, aligned_starts

Piece = tuple[int, np.ndarray]  # (offset in the bucket, in elements; values)


class FlatBuffers:
    """Flat buffers for gradients, one per dtype, with the same memory in all training steps.

    By default, the mean gradients overwrite the gradients. If the ranks sum in shared memory, they
    write the mean gradients once, into a buffer that all ranks share.

    Args:
        communicator: The Communicator of the ranks; all its ranks must allocate buffers in the same
            call (collective).
        lengths: The number of elements of each variable.
        dtypes: The NumPy dtype of each variable.
        buckets: The buckets, with their start and stop in the buffers.
        common: Whether all ranks share one buffer for the mean gradients.

    Attributes:
        means: The mean gradient of each variable, as a flat view of its buffer.
    """

    def __init__(
        self,
        communicator: Communicator,
        lengths: Sequence[int],
        dtypes: Sequence[np.dtype[np.generic]],
        buckets: Sequence[Bucket],
        common: bool,
    ) -> None:
        names = [dtype.name for dtype in dtypes]
        starts = aligned_starts(lengths, names, [dtype.itemsize for dtype in dtypes])
        ends = dict.fromkeys(names, 0)
        for bucket in buckets:
            ends[bucket.dtype] = max(ends[bucket.dtype], bucket.stop)
        kinds = dict(zip(names, dtypes, strict=True))

        def allocate_buffers(common: bool) -> dict[str, np.ndarray]:
            return {
                name: communicator.allocate(end, kinds[name], common) for name, end in ends.items()
            }

        self._gradients, self._common = allocate_buffers(False), common
        self._results = allocate_buffers(True) if common else self._gradients
        self.means = [
            self._results[name][start : start + length]
            for start, length, name in zip(starts, lengths, names, strict=True)
        ]

    def gradients(self, bucket: Bucket) -> np.ndarray:
        """Return this rank's gradients in a bucket, as a flat view of the buffer."""
        return self._gradients[bucket.dtype][bucket.start : bucket.stop]

    def mean_buffer(self, bucket: Bucket) -> np.ndarray | None:
        """Return the buffer for a bucket's mean gradients; None if they overwrite the gradients."""
        if not self._common:
            return None
        return self._results[bucket.dtype][bucket.start : bucket.stop]

    def slot_gradients(self, bucket: Bucket, slot: Slot) -> np.ndarray:
        """Return this rank's gradients in a bucket's slot (part of a variable), as a flat view."""
        return self._gradients[bucket.dtype][slot.offset : slot.offset + slot.length]


class Packing:
    """A callable object that copies the gradients of a bucket into the bucket's memory.

    Args:
        bucket: The bucket; its slots are the parts of variables that it contains.
        memory: The memory into which the gradients are copied, (length,).
        stays: The elements of the bucket that this rank itself sums in shared memory. The elements
            in `stays` are not copied, because the training step blocks until their sum is complete.
    """

    def __init__(self, bucket: Bucket, memory: np.ndarray, stays: slice) -> None:
        # Each entry of `_copies` is (slot number, elements to copy, target array).
        self._copies: list[tuple[int, slice, np.ndarray]] = []
        # Each entry of `_uncopied` is (slot number, elements, offset in the bucket).
        self._uncopied: list[tuple[int, slice, int]] = []
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
                self._uncopied.append((number, elements, first + begin))

    def __call__(self, arrays: Sequence[np.ndarray], counts: bool) -> list[Piece] | None:
        """Copy the gradients; return uncopied (offset, values) pairs, or None if all were copied.

        Args:
            arrays: For each slot of the bucket, the complete gradient of the slot's variable.
            counts: Whether this rank has samples; if it has none, every gradient counts as 0, even
                NaN.
        """
        flat = [array.reshape(-1) for array in arrays]
        for number, elements, place in self._copies:
            place[...] = flat[number][elements] if counts else 0
        pieces = [(offset, flat[number][elements]) for number, elements, offset in self._uncopied]
        if not counts:
            pieces = [(offset, np.zeros_like(values)) for offset, values in pieces]
        return pieces or None
