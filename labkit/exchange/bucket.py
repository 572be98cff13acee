"""Buckets: which gradients travel together, in which order; pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # bytes; TensorFlow reads memory that is aligned so without copying it


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of a variable, flattened; they stand from `offset` on in the arena."""

    variable: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype that travel together: elements [start, stop) of its arena."""

    dtype: str
    itemsize: int
    start: int
    stop: int
    slots: tuple[Slot, ...]

    @property
    def length(self) -> int:
        """Elements, with the few that align the variables."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.length * self.itemsize


def places(lengths: Sequence[int], dtypes: Sequence[str], itemsizes: Sequence[int]) -> list[int]:
    """Where each variable starts in the arena of its dtype: one behind the other, aligned.

    Args:
        lengths, dtypes, itemsizes: of each variable: elements, type, bytes an element.
    """
    ends: dict[str, int] = {}
    starts = []
    for length, dtype, itemsize in zip(lengths, dtypes, itemsizes, strict=True):
        unit = ALIGN // itemsize
        start = -(-ends.get(dtype, 0) // unit) * unit
        starts.append(start)
        ends[dtype] = start + length
    return starts


def pack(
    lengths: Sequence[int],
    dtypes: Sequence[str],
    itemsizes: Sequence[int],
    limit: int,
    cut: bool,
    groups: Sequence[int] | None = None,
) -> list[Bucket]:
    """Fill buckets from the last variable to the first: its gradient is ready first.

        lengths 6, 2, 3, 1 · limit 4     -> [3, 2] [1] [0]
        the same with cut                -> [3, 2] [1, end of 0] [begin of 0]

    A bucket is one piece of its arena, and so is a variable, however it is cut.

    Args:
        lengths, dtypes, itemsizes: of each variable: elements, type, bytes an element.
        limit: bytes of a bucket; a variable that is larger has a bucket of its own.
        cut: split variables so that no bucket has more than the limit and an eighth.
        groups: of each variable; a bucket holds variables of one group only.
    """
    starts = places(lengths, dtypes, itemsizes)
    itemsize = dict(zip(dtypes, itemsizes, strict=True))
    buckets: list[Bucket] = []
    filling: dict[str, list[Slot]] = {}

    def close(dtype: str) -> None:
        if slots := filling.pop(dtype, None):
            first, last = slots[-1], slots[0]  # they were filled from the end
            stop = last.offset + last.length
            buckets.append(Bucket(dtype, itemsize[dtype], first.offset, stop, tuple(slots)))

    for variable in reversed(range(len(lengths))):
        if groups is not None and groups[variable] != groups[min(variable + 1, len(groups) - 1)]:
            for dtype in list(filling):
                close(dtype)
        dtype, room = dtypes[variable], max(limit // itemsizes[variable], 1)
        stop = lengths[variable]
        while stop > 0:
            used = sum(slot.length for slot in filling.get(dtype, []))
            fits = used + stop <= room + (room // 8 if cut else 0)  # a rest does not go alone
            if used and not fits and (used >= room or not cut):
                close(dtype)
                used = 0
            start = max(stop - (room - used), 0) if cut and not fits else 0
            slot = Slot(variable, start, stop, starts[variable] + start)
            filling.setdefault(dtype, []).append(slot)
            stop = start
    for dtype in list(filling):
        close(dtype)
    return buckets


def holders(buckets: Sequence[Bucket], variable: int) -> list[int]:
    """Numbers of the buckets that hold elements of a variable."""
    return [
        number
        for number, bucket in enumerate(buckets)
        if any(slot.variable == variable for slot in bucket.slots)
    ]
