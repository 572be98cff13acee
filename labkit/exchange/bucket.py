"""Buckets: groups of gradients that ranks exchange together, and the filling of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # bytes; TensorFlow reads memory with this alignment without a copy


@dataclass(frozen=True)
class Slot:
    """The elements [start, stop) of a flattened variable, at `offset` in the flat buffer."""

    variable: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        """The number of the variable's elements in this slot."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients exchanged together: elements [start, stop) of a dtype's flat buffer."""

    dtype: str
    itemsize: int
    start: int
    stop: int
    slots: tuple[Slot, ...]

    @property
    def length(self) -> int:
        """The number of elements, including the padding that aligns the variables."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """The number of bytes of the bucket, including padding."""
        return self.length * self.itemsize


def aligned_starts(
    lengths: Sequence[int], dtypes: Sequence[str], itemsizes: Sequence[int]
) -> list[int]:
    """Return the aligned start index of each variable in the flat buffer of its dtype.

    Args:
        lengths, dtypes, itemsizes: For each variable, its number of elements, its dtype, and its
            bytes per element.
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
    """Fill buckets from the last variable to the first, because the last gradient is ready first.

        lengths 6, 2, 3, 1 · limit 4     -> [3, 2] [1] [0]
        the same with cut                -> [3, 2] [1, end of 0] [begin of 0]

    Each bucket is contiguous in its flat buffer; each variable is also contiguous, even if it is
    split into several buckets.

    Args:
        lengths, dtypes, itemsizes: For each variable, its number of elements, its dtype, and its
            bytes per element.
        limit: The maximum bytes of a bucket; without `cut`, a larger variable has a separate
            bucket.
        cut: Whether to split large variables, so that no bucket exceeds the limit by more than 1/8.
        groups: The group number of each variable; a bucket contains only variables of one group.
            With None, all variables form one group.
    """
    starts = aligned_starts(lengths, dtypes, itemsizes)
    itemsize = dict(zip(dtypes, itemsizes, strict=True))
    buckets: list[Bucket] = []
    filling: dict[str, list[Slot]] = {}

    def close(dtype: str) -> None:
        if slots := filling.pop(dtype, None):
            # Slots are filled from the last variable to the first.
            first, last = slots[-1], slots[0]
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
            # The limit may be exceeded by 1/8, because a small bucket for the last elements of a
            # variable would be inefficient.
            fits = used + stop <= room + (room // 8 if cut else 0)
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
    """Return the numbers of the buckets that contain elements of a variable."""
    return [
        number
        for number, bucket in enumerate(buckets)
        if any(slot.variable == variable for slot in bucket.slots)
    ]
