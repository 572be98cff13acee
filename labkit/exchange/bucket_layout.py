"""The layout of gradients in buckets and tables, which is the same in all training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from labkit.communicator import Communicator, SeparateBuffers, merged
from labkit.exchange.autotune import Choice
from labkit.exchange.compressed import BucketLayer
from labkit.exchange.gradient import Signature

ALIGN = 64  # TensorFlow reads memory without a copy if the address is a multiple of `ALIGN` bytes.


@dataclass(frozen=True)
class Slot:
    """The elements [start, stop) of a flattened variable, which begin at `offset` in the buffer."""

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

    Each bucket is contiguous in its flat buffer. Each variable is also contiguous, even if several
    buckets divide the variable.

    Args:
        lengths, dtypes, itemsizes: For each variable, its number of elements, its dtype, and its
            bytes per element.
        limit: The maximum size of a bucket in bytes. Without `cut`, a larger variable has a bucket
            of its own.
        cut: Whether to split large variables, so that no bucket exceeds the limit by more than 1/8.
        groups: The group number of each variable; a bucket contains only variables of one group.
            If `groups` is None, all variables form one group.
    """
    starts = aligned_starts(lengths, dtypes, itemsizes)
    itemsize = dict(zip(dtypes, itemsizes, strict=True))
    buckets: list[Bucket] = []
    filling: dict[str, list[Slot]] = {}

    def close(dtype: str) -> None:
        if slots := filling.pop(dtype, None):
            # A bucket's slots are in reverse order: the first slot contains the last variable.
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
            # A bucket may exceed the size limit by 1/8. A small bucket for a variable's last
            # elements would be inefficient.
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


# A `Piece` is a pair: the offset in the bucket, in elements, and the values.
Piece = tuple[int, np.ndarray]


class FlatBuffers:
    """Flat buffers for gradients, one per dtype, with the same memory in all training steps.

    By default, the mean gradients overwrite the gradients. If the ranks sum in shared memory, all
    ranks share one buffer for means. The ranks write the mean gradients into the shared buffer
    once.

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
        # Each entry of `_copies` contains a slot number, an element range, and the target array.
        self._copies: list[tuple[int, slice, np.ndarray]] = []
        # Each entry of `_uncopied` contains a slot number, an element range, and a bucket offset.
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
        """Copy gradients to the bucket; return the uncopied (offset, values) pairs, or None.

        Args:
            arrays: For each slot of the bucket, the complete gradient of the slot's variable.
            counts: Whether this rank has samples; if not, zeros replace its gradients, even NaN.
        """
        flat = [array.reshape(-1) for array in arrays]
        for number, elements, place in self._copies:
            place[...] = flat[number][elements] if counts else 0
        pieces = [(offset, flat[number][elements]) for number, elements, offset in self._uncopied]
        if not counts:
            pieces = [(offset, np.zeros_like(values)) for offset, values in pieces]
        return pieces or None


Dtypes: TypeAlias = Sequence["np.dtype[np.generic]"]


class BucketLayout:
    """The buckets for a set of gradients, with the gradients and sample counts of the current step.

    A parcel is either a bucket, or a table such as an embedding. For a table, ranks send only the
    changed rows of the gradient. Parcels are numbered: first the buckets, then the tables. Tables
    have no fixed memory, because each step changes different rows.

    Args:
        communicator: The Communicator of the ranks; all ranks have the same layout.
        signature: The name, shape and dtype of each gradient.
        dtypes: The NumPy dtype of each gradient.
        buckets: The buckets of gradients.
        choice: The chosen allreduce algorithm, with the reason for the choice.
        dense: Whether gradients are exchanged without compression. If true, ranks that sum in
            shared memory can share one buffer for the means.
        after: Whether the training step blocks until the sum of a packed bucket is complete. If
            true, the elements that this rank sums need no copy.

    Attributes:
        tables: The numbers of the variables that are tables: ranks send only the changed rows of
            their gradients.
        parcels: For each parcel (bucket or table), the numbers of its variables. Buckets come
            first, with variables in the order of their slots; tables follow.
        weights: For each parcel (bucket or table), the weight of this rank's gradients. The weight
            of the gradients is this rank's number of samples.
        steps: The number of the last training step that packed each parcel (bucket or table).
    """

    def __init__(
        self,
        communicator: Communicator,
        signature: Signature,
        dtypes: Dtypes,
        buckets: Sequence[Bucket],
        choice: Choice,
        dense: bool = True,
        after: bool = True,
    ) -> None:
        self.signature, self.buckets, self.choice = signature, buckets, choice
        self.tables = [number for number, gradient in enumerate(signature) if gradient.rows]
        in_buckets = [[slot.variable for slot in bucket.slots] for bucket in buckets]
        self.parcels = in_buckets + [[table] for table in self.tables]
        self._rows: dict[
            int, tuple[np.ndarray, np.ndarray]
        ] = {}  # maps each table's parcel number to its (indices, rows)
        shares = choice.in_place and dense
        self._flat = FlatBuffers(communicator, _lengths(signature), dtypes, buckets, shares)
        self._packings = [
            Packing(
                bucket,
                self._flat.gradients(bucket),
                communicator.local_part(bucket.length) if shares and after else slice(0, 0),
            )
            for bucket in buckets
        ]
        self._pieces: dict[int, list[Piece] | None] = {}
        self.weights: dict[int, float] = {}
        self.steps: dict[int, int] = {}

    def mean(self, variable: int) -> list[np.ndarray]:
        """Return a variable's mean gradient as a dense array or as sparse rows."""
        if variable not in self.tables:
            return [self._flat.means[variable]]
        indices, values = self._rows[self.holders(variable)[0]]
        return [values, indices]

    def holders(self, variable: int) -> list[int]:
        """Return the numbers of the parcels (buckets or tables) with elements of a variable."""
        if variable in self.tables:
            return [len(self.buckets) + self.tables.index(variable)]
        return holders(self.buckets, variable)

    def is_table(self, number: int) -> bool:
        """Return whether a parcel (bucket or table) contains the changed rows of a table."""
        return number >= len(self.buckets)

    def pack(self, number: int, arrays: Sequence[np.ndarray], rows: np.ndarray, step: int) -> None:
        """Copy gradients into their bucket or table; store this rank's weight (number of samples).

        Args:
            number: The number of the parcel (bucket or table).
            arrays: The complete gradients of the variables in the parcel. For an embedding table,
                the arrays are the changed rows and row numbers.
            rows: The number of samples from which the gradients in `arrays` were computed.
            step: The number of the training step.
        """
        self.weights[number], self.steps[number] = float(rows), step
        if self.is_table(number):
            values, indices = arrays
            selection = slice(None) if rows else slice(0)
            self._rows[number] = merged(indices[selection].astype(np.int32), values[selection])
        else:
            self._pieces[number] = self._packings[number](arrays, bool(rows))

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ascending indices of a table's changed rows, and the values of these rows."""
        return self._rows[number]

    def put_rows(self, number: int, indices: np.ndarray, values: np.ndarray) -> None:
        """Replace the row indices and the row values that are stored for a table."""
        self._rows[number] = indices, values

    def gradients(self, number: int) -> np.ndarray:
        """Return all gradients of a bucket, as a flat view."""
        return self._flat.gradients(self.buckets[number])

    def separate_buffers(self, number: int) -> SeparateBuffers:
        """Return a bucket's uncopied gradients, and the shared buffer for its mean, if any."""
        return SeparateBuffers(
            self._pieces.pop(number, None), self._flat.mean_buffer(self.buckets[number])
        )

    def layers(self, number: int) -> tuple[list[np.ndarray], list[BucketLayer]]:
        """Return the gradients of a bucket, in memory order, and the layer of each gradient."""
        bucket = self.buckets[number]
        pieces: list[np.ndarray] = []
        layers: list[BucketLayer] = []
        stop = 0
        for slot in sorted(bucket.slots, key=lambda slot: slot.offset):
            name, shape, *_ = self.signature[slot.variable]
            whole = slot.length == int(np.prod(shape))
            start, stop = stop, stop + slot.length
            layers.append(BucketLayer(name, start, stop, shape if whole else (slot.length,)))
            pieces.append(self._flat.slot_gradients(bucket, slot))
        return pieces, layers


def in_buckets(
    signature: Signature,
    dtypes: Dtypes,
    limit: int | None,
    cut: bool,
    groups: Sequence[int] | None = None,
) -> list[Bucket]:
    """Return the buckets into which gradients are packed, see `bucket.pack`.

    Args:
        signature: The descriptions of the gradients.
        dtypes: The NumPy dtype of each gradient.
        limit: The maximum size of a bucket in bytes; with None, each dtype has one bucket.
        cut: Whether to split large variables into several buckets.
        groups: The group number of each gradient; a bucket contains only gradients of one group.
    """
    lengths = _lengths(signature)
    names, itemsizes = [dtype.name for dtype in dtypes], [dtype.itemsize for dtype in dtypes]
    # The number `unlimited` is an upper bound of the size of all gradients in bytes.
    unlimited = sum(lengths) * 8 + 1
    return pack(lengths, names, itemsizes, limit or unlimited, cut=cut, groups=groups)


def _lengths(signature: Signature) -> list[int]:
    """Return the number of elements that each gradient has in buckets; 0 for tables."""
    return [0 if gradient.rows else int(np.prod(gradient.shape)) for gradient in signature]
