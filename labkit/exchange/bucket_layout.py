"""The layout of gradients in buckets and tables, which is the same in all training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from labkit.communicator import Communicator, SeparateBuffers, merged
from labkit.exchange.arena import FlatBuffers, Packing, Piece
from labkit.exchange.autotune import Choice
from labkit.exchange.bucket import Bucket, holders, pack
from labkit.exchange.compressed import BucketLayer
from labkit.exchange.gradient import Signature

Dtypes: TypeAlias = Sequence["np.dtype[np.generic]"]


class BucketLayout:
    """The buckets for a set of gradients, with the gradients and sample counts of the current step.

    A parcel is either a bucket, or a table (such as an embedding) for which ranks send only the
    changed rows of the gradient. Parcels are numbered: first the buckets, then the tables. Tables
    have no fixed memory, because each step changes different rows.

    Args:
        communicator: The Communicator of the ranks; all ranks have the same layout.
        signature: The name, shape and dtype of each gradient.
        dtypes: The NumPy dtype of each gradient.
        buckets: The buckets of gradients.
        choice: The chosen allreduce algorithm, with the reason for the choice.
        dense: Whether gradients are exchanged without compression; ranks that sum in shared memory
            may then share one buffer for the means.
        after: Whether the training step blocks from the packing of a bucket until its sum is
            complete; the elements that this rank sums then need no copy.

    Attributes:
        tables: The numbers of the variables that are tables: ranks send only the changed rows of
            their gradients.
        parcels: For each parcel (bucket or table), the numbers of its variables: first for all
            buckets, in the order of their slots, then for all tables.
        weights: For each parcel (bucket or table), the weight of this rank's gradients, which is
            its number of samples.
        steps: For each parcel (bucket or table), the number of the training step in which its
            gradients were packed last.
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
        ] = {}  # for each table's parcel number, its (indices, rows)
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
        """Return a variable's mean gradient as a flat view; for a table, its rows and indices."""
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
            arrays: The complete gradients of the parcel's variables; for a table, the rows and
                their indices, which may repeat.
            rows: The number of samples from which these gradients were computed.
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
        """Return arrays outside a bucket for its sum: uncopied gradients and shared mean buffer."""
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
        limit: The maximum bytes of a bucket; None: one bucket for each dtype.
        cut: Whether to split large variables into several buckets.
        groups: The group number of each gradient; a bucket contains only gradients of one group.
    """
    lengths = _lengths(signature)
    names, itemsizes = [dtype.name for dtype in dtypes], [dtype.itemsize for dtype in dtypes]
    unlimited = sum(lengths) * 8 + 1  # more bytes than all gradients have
    return pack(lengths, names, itemsizes, limit or unlimited, cut=cut, groups=groups)


def _lengths(signature: Signature) -> list[int]:
    """Return the number of elements that each gradient has in buckets; 0 for tables."""
    return [0 if gradient.rows else int(np.prod(gradient.shape)) for gradient in signature]
