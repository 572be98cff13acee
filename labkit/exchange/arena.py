"""Where the gradients of an exchange lie, how they get there, and where their means are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.communicator import Communicator
from labkit.exchange.bucket import Bucket, Slot, places

Piece = tuple[int, np.ndarray]  # offset in the bucket, values


class Arena:
    """An arena of gradients for each dtype, which stays where it is from step to step.

    Means take the place of the gradients; or, where all ranks are on one host and add up in shared
    memory, they are written once for all of them.

    Args:
        communicator: allocates, and so do all its ranks.
        lengths: elements of each variable.
        dtypes: of each variable.
        buckets: what lies where.
        common: one memory for the means of all ranks.
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
        starts = places(lengths, names, [dtype.itemsize for dtype in dtypes])
        ends = dict.fromkeys(names, 0)
        for bucket in buckets:
            ends[bucket.dtype] = max(ends[bucket.dtype], bucket.stop)
        kinds = dict(zip(names, dtypes, strict=True))

        def arenas(common: bool) -> dict[str, np.ndarray]:
            return {
                name: communicator.allocate(end, kinds[name], common) for name, end in ends.items()
            }

        self._gradients, self._common = arenas(False), common
        self._results = arenas(True) if common else self._gradients
        self.means = [
            self._results[name][start : start + length]
            for start, length, name in zip(starts, lengths, names, strict=True)
        ]  # of each variable

    def gradients(self, bucket: Bucket) -> np.ndarray:
        """What of this rank travels together."""
        return self._gradients[bucket.dtype][bucket.start : bucket.stop]

    def into(self, bucket: Bucket) -> np.ndarray | None:
        """Where the bucket's means are written; None: in place of the gradients."""
        if not self._common:
            return None
        return self._results[bucket.dtype][bucket.start : bucket.stop]

    def piece(self, bucket: Bucket, slot: Slot) -> np.ndarray:
        """The gradients of one slot."""
        return self._gradients[bucket.dtype][slot.offset : slot.offset + slot.length]


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
